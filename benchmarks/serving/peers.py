"""Several streams on one node: `tpi serve` over HTTP against llama.cpp with as many streams in one batch."""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from benchmarks.result import Check, Result, Row, Table
from benchmarks.serving.server import running
from benchmarks.serving.streams import stream_rates
from benchmarks.support.models import smollm2

NOTES = """
SmolLM2-135M from the same GGUF file, with as many threads as this machine has cores, in turn. `tpi serve` answers over
HTTP on the same machine, including sampling, detokenising and JSON. llama.cpp runs the batches of its server, one token
of each sequence in every step, through llama-cpp-python's low-level interface. It has no HTTP and takes the best token
without sampling, so it is faster than its own server. Figures are tokens per second of all streams, medians over the
turns.
"""
PYTHON = sys.executable  # that has llama-cpp-python
_ROOT = Path(__file__).parents[2]
_COUNTS = (1, 4, 8)


def bench(quick: bool) -> Result:
    """Measure TPI and llama.cpp in three turns, or one if `quick`."""
    tokens, turns = (16, 1) if quick else (64, 3)
    ours: list[dict[int, float]] = []
    theirs: list[dict[int, float]] = []
    for _ in range(turns):
        with running("-c", "1024", "--parallel", "2") as server:
            ours.append(stream_rates(server, tokens))
        theirs.append(_batched(tokens))
    rows, checks = list[Row](), list[Check]()
    for count in _COUNTS:
        tpi, llama = (median(turn[count] for turn in each) for each in (ours, theirs))
        rows.append({"streams": count, "tpi serve tok/s": tpi, "llama.cpp tok/s": llama, "ratio": tpi / llama})
        checks.append(Check(f"tpi serve over llama.cpp's batches, {count} streams", tpi / llama, 1.0))
    return Result("Streams against llama.cpp", NOTES, [Table("", rows)], checks)


def _batched(tokens: int) -> dict[int, float]:
    arguments = [str(smollm2().path), str(os.cpu_count()), str(tokens), *map(str, _COUNTS)]
    command = [PYTHON, "-m", "benchmarks.serving.batched", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=_ROOT)
    return {int(count): float(rate) for count, rate in json.loads(done.stdout.splitlines()[-1]).items()}
