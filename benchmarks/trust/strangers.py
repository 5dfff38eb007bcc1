"""The speed of a run during a thousand connections from a device that is not paired.

`python -m benchmarks.trust.strangers` starts two parts. `--answer ADDRESS --model DIR` is the part on the master's
device; `--flood HOST` is the part on the unpaired device. Each part does one round for each line on stdin, and then
prints a line.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from socket import socket
from time import perf_counter
from typing import Any

import psutil

from benchmarks.network.home import MEGABIT, MILLISECOND
from benchmarks.result import Check, Result, Table
from master.options import RunOptions
from master.session import Session
from testbed.launch import Testbed
from tests.support.cluster.key_helpers import pair_folders
from tests.support.house import timed_answer
from tests.support.models import make_model
from tpi.topology.topology import Host, HostLink, star

NOTES = """
A tiny model on a master and a paired worker, on two emulated devices (300 Mbit, 0.5 ms). A third device, of 0.2 core,
is not paired. It opens 1000 connections to the worker's three ports and sends the greeting of CurveZMQ with half a
message, or noise. Rounds of 120 tokens with and without these connections take turns. Figures are the ratio of
neighbouring rounds, and the growth of the worker's memory.
"""
PORT, CONNECTIONS, TOKENS = 9990, 1000, 120
_ROUNDS, _QUICK_ROUNDS = 15, 3
_GREETING = b"\xff" + bytes(7) + b"\x01\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)  # ZMTP 3.1, RFC 37
_CHAOS = (_GREETING + b"\x06" + (200_000).to_bytes(8, "big") + bytes(150_000), os.urandom(5000), _GREETING)
_LEAST, _MOST_BYTES = 0.9, 16 << 20


def answer(address: str, model: str) -> None:
    """Generate an answer for each line on stdin, and print its seconds."""
    with Session(RunOptions(model, workers=(address,), split="1,1", threads=1)) as session:
        prompt = [5, 6, 7, 8]
        timed_answer(session, prompt, TOKENS)
        print("ready", flush=True)
        for _ in sys.stdin:
            begun = perf_counter()
            timed_answer(session, prompt, TOKENS)
            print(perf_counter() - begun, flush=True)


def flood(host: str) -> None:
    """Open a thousand connections at one line on stdin, and close them at the next."""
    print("ready", flush=True)
    while sys.stdin.readline():
        with ExitStack() as stack:
            for number in range(CONNECTIONS):
                raw = stack.enter_context(socket())
                raw.settimeout(0.01)
                with suppress(OSError):  # not let in
                    raw.connect((host, PORT + number % 3))
                    raw.sendall(_CHAOS[number % len(_CHAOS)])
                if number == 100:
                    print("blows", flush=True)
            sys.stdin.readline()
        print("over", flush=True)


class Part:
    """A process on a device that answers lines."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def hear(self) -> str:
        """Read the next line that the part prints."""
        assert self.process.stdout
        return self.process.stdout.readline()

    def say(self) -> None:
        """Write an empty line to the part's stdin."""
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@contextmanager
def part(bed: Testbed, root: Path, device: str, *words: str) -> Iterator[Part]:
    """Run `python -u -m WORDS` on a device, with a key folder and cache of its own."""
    environment = os.environ | {"TPI_CONFIG": str(root / device), "TPI_CACHE": str(root / f"cache-{device}")}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with bed.popen(device, [sys.executable, "-u", "-m", *words], env=environment, **pipes) as process:
        try:
            yield Part(process)
        finally:
            process.kill()


def measure(root: Path, rounds: int) -> tuple[list[float], int]:
    """Return the ratio of the speed during connections to that without, by round, and the worker's growth in bytes."""
    for name in ("model", "a", "b"):
        (root / name).mkdir()
    make_model("llama", root / "model")
    pair_folders(root / "a", root / "b")
    devices = (Host("a"), Host("b"), Host("c", cpu=0.2))
    topology = star("strangers", devices, HostLink(("", ""), 300 * MEGABIT, 0.25 * MILLISECOND))
    with ExitStack() as stack:
        bed = stack.enter_context(Testbed.start(topology, root=root / "bed"))
        address, own = f"{bed.address('b')}:{PORT}", "benchmarks.trust.strangers"
        serves = ("tpi.cli", "worker", "--listen", address, "--no-announce", "--name", "b", "-t", "1")
        worker = stack.enter_context(part(bed, root, "b", *serves))
        worker.hear()
        master = stack.enter_context(part(bed, root, "a", own, "--answer", address, "--model", str(root / "model")))
        stranger = stack.enter_context(part(bed, root, "c", own, "--flood", bed.address("b")))
        assert (master.hear(), stranger.hear()) == ("ready\n", "ready\n")
        process = psutil.Process(worker.process.pid)
        before = process.memory_info().rss
        ratios, most = list[float](), before
        for _ in range(rounds):
            ratios.append(_round(master, stranger, sizes := list[int](), process))
            most = max(most, *sizes)
        return ratios, most - before


def _round(master: Part, stranger: Part, sizes: list[int], worker: psutil.Process) -> float:
    """Return the speed during connections over the speed alone. Append the worker's resident bytes to `sizes`."""
    alone = _answered(master)
    stranger.say()
    stranger.hear()
    beside = _answered(master)
    sizes.append(worker.memory_info().rss)
    stranger.say()
    stranger.hear()
    return alone / beside


def _answered(master: Part) -> float:
    master.say()
    return float(master.hear())


def bench(quick: bool) -> Result:
    """Measure 15 rounds, or three if `quick`."""
    with tempfile.TemporaryDirectory() as name:
        ratios, grown = measure(Path(name), _QUICK_ROUNDS if quick else _ROUNDS)
    middle = statistics.median(ratios)
    row = {"rounds": len(ratios), "speed beside strangers": middle, "the worker grew, MiB": grown / (1 << 20)}
    checks = [
        Check("speed of a run beside strangers", middle, _LEAST),
        Check("bytes by which the worker grew", grown, _MOST_BYTES, at_most=True),
    ]
    return Result("A run beside strangers", NOTES, [Table("", [row])], checks)


def main() -> None:
    """Run one of the parts, or the whole benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answer", metavar="ADDRESS")
    parser.add_argument("--model")
    parser.add_argument("--flood", metavar="HOST")
    parser.add_argument("--rounds", type=int, help="measure so many, and print the ratios and the bytes as JSON")
    flags = parser.parse_args()
    if flags.answer:
        answer(flags.answer, flags.model)
    elif flags.flood:
        flood(flags.flood)
    elif flags.rounds:
        with tempfile.TemporaryDirectory() as name:
            print(json.dumps(measure(Path(name), flags.rounds)))
    else:
        print(*bench(quick=False).tables[0].rows)


if __name__ == "__main__":
    main()
