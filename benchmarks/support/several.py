"""Several benchmarks one after the other, each in a process of its own, so that a failure does not end the others."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from statistics import median

from benchmarks.registry import BENCHMARKS, Benchmark

QUICK_OVER = "left out: the five minutes of --quick are over"


def announce(names: Sequence[str], took: Mapping[str, Sequence[float]]) -> None:
    """Print the expected minutes and the requirements of each benchmark, from earlier runs or else the registry."""
    minutes = {name: median(took[name]) / 60 if took.get(name) else BENCHMARKS[name].minutes for name in names}
    for name in names:
        needs = f"; needs {BENCHMARKS[name].needs}" if BENCHMARKS[name].needs else ""
        print(f"{name:16} about {minutes[name]:3.0f} min{needs}")
    print(f"{'in all':16} about {sum(minutes.values()):3.0f} min (with --quick under 5)", flush=True)


def itself(name: str) -> list[str]:
    """Return the command that runs one benchmark."""
    return [sys.executable, "-m", "benchmarks", name]


def run_all(names: Sequence[str], limit: float | None, command: Callable[[str], list[str]] = itself) -> int:
    """Run `names` and print the outcome of each at the end; return 1 if one failed, else 0.

    Args:
        limit: seconds for all together: they run with `--quick`, and any that exceed it are killed or left out.
        command: returns the command that runs one of them.
    """
    until = None if limit is None else time.monotonic() + limit
    outcomes = {name: _run(name, command(name), until) for name in names}
    print("\n".join(["", *(f"{name:16} {outcome}" for name, outcome in outcomes.items())]), flush=True)
    return int(any(outcome.startswith("FAILED") for outcome in outcomes.values()))


def lacking(benchmark: Benchmark) -> str:
    """Name the requirements of a benchmark that this machine lacks. The text is empty if the benchmark can run."""
    missing = [module for module in benchmark.extras if find_spec(module) is None]
    if benchmark.root and os.geteuid() != 0:
        missing.append("root")
    return ", ".join(missing)


def _run(name: str, command: list[str], until: float | None) -> str:
    if missing := lacking(BENCHMARKS[name]):
        return f"left out: needs {missing}"
    left = None if until is None else until - time.monotonic()
    if left is not None and left <= 0:
        return QUICK_OVER
    print(f"\n=== {name}", flush=True)
    begun = time.monotonic()
    status = _child([*command, *(["--quick"] if until else [])], left)
    seconds = f"{time.monotonic() - begun:.0f} s"
    if status is None:
        return f"ended after {seconds}: the five minutes of --quick are over"
    return f"FAILED with status {status} after {seconds}" if status else f"done in {seconds}"


def _child(command: Sequence[str], seconds: float | None) -> int | None:
    """Run a command and return its exit status, or None if it exceeded `seconds`.

    All processes that the command has started are killed at the end.
    """
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:  # interrupted, or too late
                os.killpg(process.pid, signal.SIGKILL)
