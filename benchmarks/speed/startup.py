"""Memory of a worker before it has a model, and time to the first token."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.result import Check, Result, Row, Table
from benchmarks.support.machine import MIB, status_bytes
from benchmarks.support.models import smollm2
from tpi.config import default_cache

TPI = (sys.executable, "-m", "tpi.cli")
HEAVY = ("torch", "transformers", "tokenizers", "huggingface_hub", "gguf", "scipy", "jinja2", "rich")
FORBIDDEN = {"torch", "transformers"}
NOTES = """
A worker's bare footprint is its VmRSS (and its peak, VmHWM) when it has reported that it listens. `tpi run --local 2`
is timed from the start of the command to the first byte of the answer on stdout. In this time three Python processes
start, the pack is opened, two workers are connected and get their plans, weights are loaded from each node's warm
cache, the prompt is computed and a token is decoded. Figures are medians and the worst.
"""


def bench(quick: bool) -> Result:
    """Measure a worker and a run."""
    repeats = 2 if quick else 11
    prompt = ("-p", "What is the capital of France?", "--temp", "0", "-n", "8")
    run = (*TPI, "run", "-m", str(smollm2().path), "--local", "2", *prompt)
    first_token(run)  # the cache is warm from here on
    workers = [worker() for _ in range(repeats)]
    ready, resident, peak = ([figures[key] for figures in workers] for key in range(3))
    seconds = [first_token(run) for _ in range(repeats)]
    imported = {name: heavy(modules) for name, modules in imports(run).items()}
    rows: list[Row] = [
        {"figure": "worker ready, s", "median": median(ready), "worst": max(ready)},
        {"figure": "worker VmRSS, MiB", "median": median(resident), "worst": max(resident)},
        {"figure": "worker VmHWM, MiB", "median": median(peak), "worst": max(peak)},
        {"figure": "first token of tpi run --local 2, s", "median": median(seconds), "worst": max(seconds)},
    ]
    loaded: list[Row] = [{"process": name, "imports": ", ".join(found) or "none"} for name, found in imported.items()]
    checks = [
        Check("worker ready, s", median(ready), 1.0, at_most=True),
        Check("worker bare footprint, MiB", max(peak), 90.0, at_most=True),
        Check("first token of tpi run --local 2, s", median(seconds), 2.5, at_most=True),
        Check("processes that import torch or transformers",
              sum(bool(FORBIDDEN & set(found)) for found in imported.values()), 0, at_most=True),
    ]  # fmt: skip
    tables = [Table("Start", rows), Table(f"Which of these modules a run imports: {', '.join(HEAVY)}", loaded)]
    return Result("Start and footprint", NOTES, tables, checks)


def worker(
    tpi: Sequence[str] = TPI, environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> tuple[float, float, float]:
    """Return the seconds until a worker listens, and its VmRSS and VmHWM in MiB at that time.

    `tpi` is the command; it runs in `folder`.
    """
    with TemporaryDirectory() as cache:
        started = time.perf_counter()
        process = subprocess.Popen(
            [*tpi, "worker", "--listen", "127.0.0.1:0", "--cache", cache],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, cwd=folder,
        )  # fmt: skip
        try:
            assert process.stdout
            assert b"listens on" in process.stdout.readline()
            ready = time.perf_counter() - started
            return ready, status_bytes(process.pid, "VmRSS") / MIB, status_bytes(process.pid, "VmHWM") / MIB
        finally:
            process.terminate()
            process.wait()
            process.stdout.close()  # type: ignore[union-attr]


def first_token(
    command: Sequence[str], environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> float:
    """Return the seconds from the start of the command, in `folder`, to the first byte on its stdout."""
    started = time.perf_counter()
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment, cwd=folder, **pipes) as process:
        assert process.stdout
        found = os.read(process.stdout.fileno(), 1)
        seconds = time.perf_counter() - started
        process.stdout.read()
    assert found, "the command printed nothing"
    assert process.returncode == 0
    return seconds


def imports(command: tuple[str, ...]) -> dict[str, set[str]]:
    """List the modules that the master and a local worker import in a run, from Python's own list on stderr."""
    environment = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    log = default_cache() / "local" / "worker-1" / "worker.log"  # where a local worker's stderr goes
    return {"master": _modules(done.stderr), "worker": _modules(Path(log).read_text())}


def heavy(modules: set[str]) -> list[str]:
    """Return the modules of `HEAVY` that were imported."""
    return [name for name in HEAVY if name in modules]


def _modules(listing: str) -> set[str]:
    """Return the names of top-level modules in `listing`, which is the output of -X importtime."""
    found = re.findall(r"^import time:\s*\d+ \|\s*\d+ \|\s*([\w.]+)$", listing, re.MULTILINE)
    return {name.partition(".")[0] for name in found}
