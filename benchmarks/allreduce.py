"""Collectives against a raw TCP star on this machine: `python -m benchmarks.allreduce [--json FILE]`.

Every contender has worker processes of its own, idle while another is measured; rounds of all contenders are
interleaved, so that what else the machine does hits all alike. Figures are medians over all exchanges of a payload.
"""

import argparse
import json
import multiprocessing
import socket
import statistics
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from allreduce.base import F32, Endpoints, GroupSpec, Peer, open_group
from benchmarks import tcp_star
from tpi.errors import NodeLost
from tpi.sockets import COLLECTIVE, Net

BASELINE = "tcp-star"
_SESSION = 0x7470_6962_656E_6368


class Contender(Protocol):
    """What is measured."""

    def allreduce(self, partial: F32) -> F32:
        """The sum of all partials."""

    def close(self) -> None:
        """Hang up."""


@dataclass(frozen=True)
class Plan:
    """What all processes of a contender do, in step."""

    name: str  # a collective, or the baseline
    wire: str
    payloads: tuple[int, ...]  # bytes of f32
    rounds: int
    repeat: int
    spin_us: int

    def exchanges(self) -> Iterator[F32]:
        """The partial of every exchange in order."""
        partials = [np.ones(payload // 4, np.float32) for payload in self.payloads]
        for _ in range(self.rounds):
            for partial in partials:
                yield from (partial,) * self.repeat


def _spec(plan: Plan, rank: int, ports: list[int]) -> GroupSpec:
    peers = (Peer(0, "master"), *(Peer(r, f"worker{r}", f"tcp://127.0.0.1:{p}") for r, p in enumerate(ports, 1)))
    return GroupSpec(rank, _SESSION, 1, peers, plan.wire, timeout_s=60, spin_us=plan.spin_us)


def _worker(plan: Plan, rank: int, pipe: Connection) -> None:
    """One worker process: says its port, hears everyone's, and takes part in every exchange."""
    contender: Contender
    if plan.name == BASELINE:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            pipe.send(listener.getsockname()[1])
            pipe.recv()
            contender = tcp_star.Worker(listener)
    else:
        net = Net()
        router, port = net.bind(COLLECTIVE, "127.0.0.1", 0)
        pipe.send(port)
        contender = open_group(plan.name, _spec(plan, rank, pipe.recv()), Endpoints(net, router))
    with suppress(NodeLost, ConnectionError, KeyboardInterrupt):
        for partial in plan.exchanges():
            contender.allreduce(partial)
    pipe.recv()
    contender.close()


@contextmanager
def _running(plan: Plan, size: int) -> Iterator[Contender]:
    """The master's side of a contender whose workers run."""
    pipes, processes = [], []
    for rank in range(1, size):
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=_worker, args=(plan, rank, theirs), daemon=True)
        process.start()
        theirs.close()  # so that a worker that fails ends the run
        pipes.append(ours)
        processes.append(process)
    ports = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send(ports)
    master: Contender
    if plan.name == BASELINE:
        master = tcp_star.Master([("127.0.0.1", port) for port in ports])
    else:
        master = open_group(plan.name, _spec(plan, 0, ports), Endpoints(Net()))
    with closing(master):
        yield master
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join()


def _measure(plans: list[Plan], size: int) -> dict[str, dict[int, float]]:
    """Median seconds per contender and payload; the first round is not counted."""
    if not plans:
        return {}
    times: dict[str, dict[int, list[float]]] = {plan.name: {p: [] for p in plan.payloads} for plan in plans}

    def rounds(active: list[tuple[Plan, Contender, Iterator[F32]]]) -> None:
        for turn in range(plans[0].rounds):
            for plan, contender, exchanges in active:
                for payload in plan.payloads:
                    for _ in range(plan.repeat):
                        partial = next(exchanges)
                        started = perf_counter()
                        contender.allreduce(partial)
                        if turn:
                            times[plan.name][payload].append(perf_counter() - started)

    def enter(left: list[Plan], active: list[tuple[Plan, Contender, Iterator[F32]]]) -> None:
        if not left:
            rounds(active)
            return
        with _running(left[0], size) as contender:
            enter(left[1:], [*active, (left[0], contender, left[0].exchanges())])

    enter(plans, [])
    return {name: {p: statistics.median(t) for p, t in by_size.items()} for name, by_size in times.items()}


def _rows(size: int, medians: dict[str, dict[int, float]]) -> list[dict[str, Any]]:
    base = medians[BASELINE]
    return [
        {"nodes": size, "collective": name, "payload_bytes": payload, "seconds": s, "times_tcp_star": s / base[payload]}
        for name, by_size in medians.items()
        for payload, s in by_size.items()
    ]


def _print(size: int, medians: dict[str, dict[int, float]], payloads: tuple[int, ...]) -> None:
    print(f"\n{size} nodes, microseconds (times the TCP star)")
    print("payload".ljust(10) + "".join(f"{payload / 1000:>13.1f} kB" for payload in payloads))
    for name, by_size in medians.items():
        cells = (f"{by_size[p] * 1e6:9.0f} ({by_size[p] / medians[BASELINE][p]:4.2f})" for p in payloads)
        print(name.ljust(10) + "".join(cells))


def main() -> None:
    """Parse the command line, measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", default="2,4", help="numbers of nodes, the master included")
    parser.add_argument("--payloads", default="2304,16384,32768,1048576", help="bytes of f32")
    parser.add_argument("--collectives", default="star,mesh,two-shot,tree,ring")
    parser.add_argument("--wire", default="f32")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--spin-us", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    payloads = tuple(int(payload) for payload in options.payloads.split(","))
    names = [BASELINE, *options.collectives.split(",")]
    rows = []
    for size in map(int, options.nodes.split(",")):
        plans = [Plan(n, options.wire, payloads, options.rounds, options.repeat, options.spin_us) for n in names]
        medians = _measure(plans, size)
        _print(size, medians, payloads)
        rows += _rows(size, medians)
    if options.json:
        options.json.write_text(json.dumps({"wire": options.wire, "spin_us": options.spin_us, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
