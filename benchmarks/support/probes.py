"""Measurements that `benchmarks.compare` takes of two commits by their command lines: speeds, seconds, peak memory."""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.speed.startup import first_token, worker
from benchmarks.support.machine import MIB
from benchmarks.support.models import Model, llama_1b, smollm2

Figures = dict[str, float]
"""By name: ends in `, s` where less is better, in `MiB` where it is memory, else it is tokens/s."""

WORK = ("-c", "1024", "--prompt-tokens", "128", "--gen-tokens", "48", "--repeat", "3", "--json")
STREAMED = "200MiB"  # of the 540 MB of SmolLM2 in f32
OWN = """
import json, sys
import tpi, scheduler, worker, master, allreduce  # the installed packages, with native modules; the tree has none
sys.path.insert(0, sys.argv[1])
"""
BATCHES = """
from benchmarks.experts.cgopipe import SETTINGS, STEPS, _run
print(json.dumps({f"batch, {setting.name}": _run(setting, STEPS).rate for setting in SETTINGS}))
"""
HYBRID = """
from benchmarks.sparsity.hybrid import bench
print(json.dumps({f"{row['']}, s": row["ms per token"] / 1e3 for row in bench(quick=True).tables[0].rows}))
"""
EXPERTS = """
from benchmarks.experts.disk import bench
rows = bench(quick=True).tables[0].rows
print(json.dumps({f"repeats {row['repeats']}, s": row["ms, a quarter"] / 1e3 for row in rows}))
"""
SERVING = """
from benchmarks.serving.server import running
from benchmarks.serving.streams import stream_rates
with running("-c", "4096") as server:
    print(json.dumps({f"{count} streams": rate for count, rate in stream_rates(server, 32).items()}))
"""
ANSWER = ("--local", "2", "-p", "What is the capital of France?", "--temp", "0", "-n", "8")


@dataclass(frozen=True)
class Side:
    """One commit: the Python of an environment in which it is installed, and its cache and working directory.

    `tree` is the folder of the commit's files, which include its benchmarks.
    """

    python: str
    cache: Path
    tree: Path

    @property
    def tpi(self) -> tuple[str, ...]:
        """The side's `tpi` command."""
        return (self.python, "-m", "tpi.cli")

    @property
    def environment(self) -> dict[str, str]:
        """Environment of the side's processes, in which no module of this process is found."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TPI_WORKERS")}
        return kept | {"TPI_CACHE": str(self.cache)}

    def own(self, code: str) -> Any:
        """Run `code` with the benchmarks of the side's tree; return the last line that it prints, read as JSON."""
        self.cache.mkdir(exist_ok=True)
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        command = [self.python, "-c", OWN + code, str(self.tree)]
        done = subprocess.run(command, env=self.environment, cwd=self.cache, check=True, **pipes)
        return json.loads(done.stdout.splitlines()[-1])

    def bench(self, model: Model, *flags: str) -> dict[str, Any]:
        """Return the fields that the side's `tpi bench --json` prints."""
        self.cache.mkdir(exist_ok=True)
        command = [*self.tpi, "bench", "-m", str(model.path), *WORK, *flags]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        done = subprocess.run(command, env=self.environment, cwd=self.cache, check=True, **pipes)
        fields: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return fields


def _figures(about: str, said: dict[str, Any]) -> Figures:
    found = {f"{about}: {kind}": said[f"{kind}_tokens_per_s"] for kind in ("decode", "prefill")}
    peaks = {f"{about}: peak of {node['name']}, MiB": node["peak_rss_bytes"] / MIB for node in said["nodes"]}
    return found | peaks


def peers(side: Side) -> Figures:
    """Return the figures of one node of two threads."""
    return {
        name: value
        for model in (smollm2(), llama_1b())
        for name, value in _figures(model.name, side.bench(model, "-t", "2")).items()
    }


def two_nodes(side: Side) -> Figures:
    """Return the figures of two nodes of one thread each."""
    return {
        name: value
        for model in (smollm2(), llama_1b())
        for name, value in _figures(model.name, side.bench(model, "-t", "1", "--local", "1")).items()
    }


def startup(side: Side) -> Figures:
    """Return the figures of the start of a worker, and of the first token of a run with two nodes."""
    side.cache.mkdir(exist_ok=True)
    ready, resident, _ = worker(side.tpi, side.environment, side.cache)
    run = (*side.tpi, "run", "-m", str(smollm2().path), *ANSWER)
    return {
        "worker ready, s": ready,
        "first token of tpi run --local 2, s": first_token(run, side.environment, side.cache),
        "worker, MiB": resident,
    }


def streamed(side: Side) -> Figures:
    """Return the figures of a run with a memory budget under which most weights are streamed."""
    model, fewer = smollm2(), ("--gen-tokens", "16", "--repeat", "1")  # these options come before those of `WORK`
    said = side.bench(model, "--dtype", "f32", "--memory", STREAMED, *fewer)
    return _figures(f"{model.name} in f32, {STREAMED}", said)


def _own(code: str) -> Callable[[Side], Figures]:
    """Return a probe that runs `code` with each side's own benchmarks."""

    def probe(side: Side) -> Figures:
        figures: Figures = side.own(code)
        return figures

    return probe


PROBES: dict[str, Callable[[Side], Figures]] = {
    "peers": peers,
    "two_nodes": two_nodes,
    "startup": startup,
    "streamed": streamed,
    "cgopipe": _own(BATCHES),  # decode of a batch on emulated machines, by the policy that each commit chooses
    "hybrid": _own(HYBRID),
    "experts_disk": _own(EXPERTS),
    "serving": _own(SERVING),
}
