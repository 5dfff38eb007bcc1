"""`python -m benchmarks.trust.curve`: the cost of encryption for a sum between two processes of this machine.

Rounds alternate between connections with keys and without, so that other load disturbs both alike.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from time import perf_counter

import numpy as np

from allreduce.base import Endpoints, Group, GroupSpec, Peer, open_group
from benchmarks.result import Result, Row, Table
from tpi.keys.policy import KeyPolicy
from tpi.net.sockets import COLLECTIVE, Net

NOTES = """
A star of two processes of this machine over TCP on loopback, bf16, alternately with and without CurveZMQ. Figures are
microseconds per sum, and the additional time of all sums of a token or of one sum of a prompt.
"""
SHAPES = {"SmolLM2-135M": (576, 60), "1.1B": (2048, 44)}  # hidden size, sums of a token
PREFILL_TOKENS = 128
ROUNDS, SUMS, PREFILL_SUMS = 12, 200, 20


def group(net: Net, rank: int, port: int, key: bytes, router: object = None) -> Group:
    """Open this process's side of a star collective of two ranks, with bf16 on the wire."""
    peers = (Peer(0, "master"), Peer(1, "worker", f"tcp://127.0.0.1:{port}", key))
    return open_group("star", GroupSpec(rank, 7, 1, peers, "bf16"), Endpoints(net, router))  # type: ignore[arg-type]


def sums(one: Group, values: int, count: int) -> float:
    """Return the median seconds of `count` sums of `values` numbers."""
    partial, times = np.ones((1, values), np.float32), []
    for _ in range(count):
        started = perf_counter()
        one.allreduce(partial)
        times.append(perf_counter() - started)
    return statistics.median(times)


def schedule() -> Iterator[tuple[bool, int, int]]:
    """Yield the rounds that both sides compute together: (with keys, numbers in a sum, number of sums)."""
    for _ in range(ROUNDS):
        for keys in (False, True):
            for hidden, _ in SHAPES.values():
                yield keys, hidden, SUMS
                yield keys, hidden * PREFILL_TOKENS, PREFILL_SUMS


def run(groups: dict[bool, Group]) -> dict[tuple[bool, int], list[float]]:
    """Compute the sums of `schedule`; return the seconds of each round by (with keys, numbers in a sum)."""
    found: dict[tuple[bool, int], list[float]] = {}
    for one in groups.values():
        one.begin(1)
    for keys, values, count in schedule():
        found.setdefault((keys, values), []).append(sums(groups[keys], values, count))
    return found


def policies(folder: Path) -> dict[bool, KeyPolicy]:
    """Return a key policy without keys, and one that requires keys of every host."""
    return {False: KeyPolicy(folder, locked=False), True: KeyPolicy(folder, outside=lambda host: True)}


def worker(folder: Path) -> None:
    """Print the ports of this process's groups, then compute the sums, as the worker."""
    with ExitStack() as stack:
        groups, ports = {}, []
        for keys, policy in policies(folder).items():
            net = stack.enter_context(closing(Net(policy=policy)))
            router, port = net.bind(COLLECTIVE, "127.0.0.1", 0)
            groups[keys] = stack.enter_context(closing(group(net, 1, port, b"", router)))
            ports.append(port)
        print(json.dumps(ports), flush=True)
        run(groups)


@contextmanager
def other(folder: Path) -> Iterator[list[int]]:
    """Start the worker process and yield its ports."""
    command = [sys.executable, "-m", "benchmarks.trust.curve", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout
        yield json.loads(process.stdout.readline())


def measure() -> dict[tuple[bool, int], list[float]]:
    """Compute the sums as the master. Return the seconds of each round by (with keys, numbers in a sum)."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        identity = KeyPolicy(folder).identity
        ports = stack.enter_context(other(folder))
        groups = {}
        for (keys, policy), port in zip(policies(folder).items(), ports, strict=True):
            net = stack.enter_context(closing(Net(policy=policy)))
            groups[keys] = stack.enter_context(closing(group(net, 0, port, identity.public if keys else b"")))
        return run(groups)


def rows(found: dict[tuple[bool, int], list[float]]) -> list[Row]:
    """Return a row for a token and a row for a prompt of each model."""
    lines: list[Row] = []
    for model, (hidden, count) in SHAPES.items():
        for what, values, times in (("token", hidden, count), (f"{PREFILL_TOKENS} tokens", hidden * PREFILL_TOKENS, 1)):
            plain, keyed = (statistics.median(found[keys, values]) for keys in (False, True))
            more = statistics.median(b - a for a, b in zip(found[False, values], found[True, values], strict=True))
            lines.append(
                {
                    "model": model,
                    "step": what,
                    "a sum without keys, us": plain * 1e6,
                    "with, us": keyed * 1e6,
                    "sums": times,
                    "more for all, ms": more * times * 1e3,
                }
            )
    return lines


def bench(quick: bool) -> Result:
    """Measure the cost of keys. `quick` is ignored, because the benchmark takes only seconds."""
    return Result("Cost of encryption", NOTES, [Table("", rows(measure()))])


def main() -> None:
    """Print the table."""
    for row in rows(measure()):
        print(row)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        worker(Path(sys.argv[1]))
    else:
        main()
