"""One node of `benchmarks.network.allreduce`: a process that takes part in every contender, as its input directs."""

import json
import socket
import statistics
import sys
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from allreduce.auto import Auto
from allreduce.base import F32, Endpoints, GroupSpec, Peer, open_group
from benchmarks.network import tcp_star
from tpi.net.monitor import Socket
from tpi.net.sockets import COLLECTIVE, Net

BASELINE = "tcp-star"
_ROW = 4  # exchanges
_SESSION = 0x7470_6962_656E_6368


@dataclass(frozen=True)
class Plan:
    """Steps that all nodes make together."""

    contenders: tuple[str, ...]  # collectives, and the baseline
    wire: str
    payloads: tuple[int, ...]  # bytes of f32
    rounds: int
    repeat: int  # rows of exchanges per round
    spin_us: int

    def to_dict(self) -> dict[str, Any]:
        """Convert the plan to plain types for JSON."""
        return asdict(self)


class Contender(Protocol):
    """The interface of whatever is measured: a collective or the baseline."""

    def allreduce(self, partial: F32) -> F32:
        """Return the sum of the partial results of all nodes."""

    def close(self) -> None:
        """Close the connections."""


class GroupNode:
    """One rank of the group, which takes part in every collective that is measured."""

    def __init__(self, rank: int, hosts: list[str], plan: Plan) -> None:
        self.rank, self.hosts, self.plan = rank, hosts, plan
        self.net = Net()
        self._listener: socket.socket | None = None
        self._routers: dict[str, Socket] = {}

    def bind(self) -> dict[str, int]:
        """Listen, and return the ports by contender; the master returns no ports."""
        if self.rank == 0:
            return {}
        host = self.hosts[self.rank]
        self._listener = socket.create_server((host, 0))
        ports = {BASELINE: self._listener.getsockname()[1]}
        for name in self.plan.contenders[1:]:
            self._routers[name], ports[name] = self.net.bind(COLLECTIVE, host, 0)
        return ports

    def join(self, name: str, ports: list[dict[str, int]]) -> Contender:
        """Open this rank's side of a contender."""
        if name == BASELINE:
            if self._listener is not None:
                return tcp_star.Worker(self._listener)
            return tcp_star.Master([(self.hosts[rank], ports[rank][name]) for rank in range(1, len(ports))])
        addresses = ["", *(f"tcp://{self.hosts[rank]}:{ports[rank][name]}" for rank in range(1, len(ports)))]
        peers = tuple(Peer(rank, f"node{rank}", address) for rank, address in enumerate(addresses))
        plan, values = self.plan, (min(self.plan.payloads) // 4, max(self.plan.payloads) // 4)
        spec = GroupSpec(self.rank, _SESSION, 1, peers, plan.wire, 60, plan.spin_us, payload_values=values)
        return open_group(name, spec, Endpoints(self.net, self._routers.get(name)))

    def run(self, contenders: dict[str, Contender]) -> dict[str, list[float]]:
        """Return seconds for each contender and payload: the median over several series of each series' mean.

        A series is a few exchanges in a row. Single exchanges say little, because a node that is done early waits for
        the others in the next exchange.
        """
        plan = self.plan
        partials = [np.ones(payload // 4, np.float32) for payload in plan.payloads]
        times: dict[str, list[list[float]]] = {name: [[] for _ in partials] for name in contenders}
        for _ in range(plan.rounds):
            for name, contender in contenders.items():
                for partial, seconds in zip(partials, times[name], strict=True):
                    contender.allreduce(partial)
                    for _ in range(plan.repeat):
                        started = perf_counter()
                        for _ in range(_ROW):
                            contender.allreduce(partial)
                        seconds.append((perf_counter() - started) / _ROW)
        return {name: [statistics.median(seconds) for seconds in columns] for name, columns in times.items()}


def _report(contenders: dict[str, Contender], medians: dict[str, list[float]]) -> dict[str, Any]:
    report: dict[str, Any] = {"medians": medians}
    auto = contenders.get("auto")
    if isinstance(auto, Auto) and auto.choice is not None:
        report |= {"choice": auto.choice.fields()}
    return report


def main() -> None:
    """Run one node: read the task, print the ports, read all ports, and run; the master then prints the figures."""
    task = json.loads(sys.stdin.readline())
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in task["plan"].items()}
    plan = Plan(**fields)
    node = GroupNode(task["rank"], task["hosts"], plan)
    print(json.dumps(node.bind()), flush=True)
    ports = json.loads(sys.stdin.readline())
    with ExitStack() as stack:
        contenders = {name: stack.enter_context(closing(node.join(name, ports))) for name in plan.contenders}
        medians = node.run(contenders)
        if node.rank == 0:
            print(json.dumps(_report(contenders, medians)), flush=True)
        sys.stdin.readline()  # until the run is over


if __name__ == "__main__":
    main()
