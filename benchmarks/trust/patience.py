"""An hour of `tpi serve` over slow, lossy links (200 ms, 5% loss), with a worker on a busy machine.

`python -m benchmarks.trust.patience --minutes 60`. No worker may be reported as lost, however long its work takes.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any

import httpx

from benchmarks.result import Check, Result, Table
from testbed.cluster import HostWorkerOptions, workers
from testbed.launch import Testbed
from tests.support.models import make_model
from tpi.topology.topology import Host, HostLink, Topology, star

NOTES = """
A tiny model served on three emulated devices, with 1 Mbit/s, 200 ms from end to end and 5% loss each way. The second
device has 0.2 core, which it shares with a program that computes without end. One request of eight tokens is sent every
minute. No device may be reported as lost: the log must not name a worker, and every answer must equal the first.
"""
LATENCY_S, LOSS, BITS = 0.2, 0.05, 1e6
MINUTE_S, TOKENS = 60.0, 8
BUSY_CORES = 0.2
_FULL_MINUTES, _QUICK_MINUTES = 60, 3
_SPIN = "while True: pass"
_COMMAND = [sys.executable, "-u", "-m"]
# the server's log line about a worker that it goes on without
EVICTED = re.compile(r"is lost|going on with|planned anew")


@dataclass(frozen=True)
class Answered:
    """One request: its start (seconds after the first request), its seconds, its status, and the answer's text."""

    at: float
    seconds: float
    status: int
    text: str


@dataclass(frozen=True)
class Patience:
    """All answers, and the server's log lines about workers that were left out."""

    answers: Sequence[Answered]
    evictions: Sequence[str]

    @property
    def wrong(self) -> int:
        """How many answers failed, or differ from the first answer."""
        return sum(one.status != 200 or one.text != self.answers[0].text for one in self.answers)


def far_homes() -> Topology:
    """Return three devices around a router; each link has half of the latency and loss between two devices."""
    devices = (Host("a"), Host("b", cpu=BUSY_CORES), Host("c"))
    return star("far", devices, HostLink(("", ""), BITS, LATENCY_S / 2, loss=LOSS / 2))


def serve_patiently(root: Path, minutes: float, every_s: float = MINUTE_S) -> Patience:
    """Serve for `minutes`, with one request every `every_s` seconds. Needs root; `root` is an empty folder.

    Raises:
        RuntimeError: if the server does not start or the client fails; the message holds its output.
    """
    (root / "model").mkdir()
    model = make_model("llama", root / "model")
    log = root / "log"
    with ExitStack() as stack:
        bed = stack.enter_context(Testbed.start(far_homes(), "tun", root=root / "bed"))
        addresses = stack.enter_context(workers(bed, HostWorkerOptions(cache=root, logs=root / "logs", patience=120)))
        stack.enter_context(_ended(bed.popen("b", [sys.executable, "-c", _SPIN])))
        url = stack.enter_context(_served(bed, model.directory, addresses, log))
        answers = list(_asked(bed, url, minutes, every_s))
    return Patience(answers, [line for line in log.read_text().splitlines() if EVICTED.search(line)])


@contextmanager
def _ended(process: "subprocess.Popen[Any]") -> Iterator["subprocess.Popen[Any]"]:
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def _served(bed: Testbed, model: Path, addresses: str, log: Path) -> Iterator[str]:
    command = [*_COMMAND, "tpi.cli", "serve", "-m", str(model), "--workers", addresses, "--split", "1,1,1", "-t", "1",
               "--port", "0", "-q"]  # fmt: skip
    environment = os.environ | {"TPI_CACHE": str(log.parent / "a")}
    with log.open("wb") as file:
        process = bed.popen("a", command, env=environment, stdout=subprocess.PIPE, stderr=file, text=True)
    with _ended(process):
        assert process.stdout
        with process.stdout:
            line = next((line for line in process.stdout if " is served at " in line), "")
            if not line:
                raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")
            yield re.findall(r"http://[^;\s]+", line)[0]


def _asked(bed: Testbed, url: str, minutes: float, every_s: float) -> Iterator[Answered]:
    """Run the client on the first device, which alone reaches the server, and yield its answers."""
    command = [*_COMMAND, "benchmarks.trust.patience", "--minutes", str(minutes), "--every", str(every_s), "--ask", url]
    with bed.popen("a", command, stdout=subprocess.PIPE, text=True) as process, _ended(process):
        assert process.stdout
        for line in process.stdout:
            answered = Answered(**json.loads(line))
            print(f"{answered.at:.0f} s: {answered.status} in {answered.seconds:.1f} s", file=sys.stderr, flush=True)
            yield answered
        if process.wait():
            raise RuntimeError("the client process failed; its output stands above")


def ask(url: str, minutes: float, every_s: float) -> Iterator[Answered]:
    """Send one request every `every_s` seconds and yield each answer."""
    body = {"prompt": "Hello", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    begun, number = monotonic(), 0
    with httpx.Client(base_url=url, timeout=10 * MINUTE_S) as http:
        while (due := number * every_s) < minutes * MINUTE_S:
            Event().wait(max(0.0, begun + due - monotonic()))
            asked = monotonic()
            answer = http.post("/v1/completions", json=body)
            text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text[:200]
            yield Answered(asked - begun, monotonic() - asked, answer.status_code, text)
            number += 1


def result(found: Patience, minutes: float) -> Result:
    """Convert the answers to the result that the page shows."""
    seconds = [one.seconds for one in found.answers]
    row = {
        "minutes": minutes,
        "requests": len(seconds),
        "failed or changed": found.wrong,
        "workers reported as lost": len(found.evictions),
        "answer p50, s": statistics.median(seconds),
        "most, s": max(seconds),
    }
    checks = [
        Check("working devices reported as lost", len(found.evictions), 0, within=0),
        Check("answers that failed or changed", found.wrong, 0, within=0),
    ]
    return Result("Patience with slow links and a busy worker", NOTES, [Table("", [row])], checks)


def bench(quick: bool) -> Result:
    """Serve for an hour, or three minutes if `quick`."""
    minutes = _QUICK_MINUTES if quick else _FULL_MINUTES
    with tempfile.TemporaryDirectory() as name:
        return result(serve_patiently(Path(name), minutes), minutes)


def main() -> None:
    """Run the client on the first device, or the whole benchmark, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=_FULL_MINUTES)
    parser.add_argument("--every", type=float, default=MINUTE_S, help="seconds between requests")
    parser.add_argument("--ask", metavar="URL", help="only ask this server, and print a line of JSON for each answer")
    flags = parser.parse_args()
    if flags.ask:
        for one in ask(flags.ask, flags.minutes, flags.every):
            print(json.dumps(asdict(one)), flush=True)
        return
    with tempfile.TemporaryDirectory() as name:
        found = serve_patiently(Path(name), flags.minutes, flags.every)
    print(json.dumps(asdict(result(found, flags.minutes)), indent=1))
    print(*found.evictions, sep="\n", file=sys.stderr)
    sys.exit(bool(found.wrong or found.evictions))


if __name__ == "__main__":
    main()
