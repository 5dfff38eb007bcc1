"""Time of a prompt of 128 tokens on four devices, against the least time that their links allow."""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from allreduce.predict import PREDICTIONS, predict
from benchmarks.network.awake import awake
from benchmarks.network.home import MEGABIT, MILLISECOND, Home, home, specified_links, wheel
from benchmarks.result import Check, Result, Row, Table
from tpi.topology.schema import load_topology
from tpi.topology.topology import Topology
from tpi.trace import EMBEDDING, HEAD

MODEL, HIDDEN, LAYERS = "smollm2-135m", 576, 30
PROMPT = 128
BOUND = 1.2
NOTES = """
SmolLM2, 128 tokens in one step, 60 sums of 147 kB (bf16), in two halves of the tokens. While the sum of one half is in
transit, the other half computes, so a prompt can take less than the sum of floor and compute. The *floor* is computed
from the topology file. It adds, for each sum, the least time of any collective (bytes over bandwidth, plus latencies),
and the time to send the prompt's embeddings, in f32, from the master to every worker. *Compute* is measured in the same
step by `--trace`: for every block the time of the slowest device (here four devices share two cores). The embedding,
the head, sampling and the overhead of the runtime are in the measured time only. Figures are medians over the turns.
Processors are prevented from sleeping (`benchmarks/network/awake.py`).
"""


@dataclass(frozen=True)
class Prefill:
    """Seconds of one prompt."""

    total: float
    compute: float
    collective: str


@awake()
def bench(quick: bool) -> Result:
    """Measure prefill on four networks."""
    rows: list[Row] = []
    checks = []
    for topology in (wheel(4, 4 * MILLISECOND, 300 * MEGABIT), *map(load_topology, SHIPPED)):
        about = topology.name if topology.name in SHIPPED else "4 ms, 300 Mbit"
        with home(topology) as place:
            runs = [_measure(place) for _ in range(1 if quick else 5)]
        least = floor(topology)
        bounds = [run.total / (BOUND * least + run.compute) for run in runs]
        checks.append(Check(f"{about}: time over {BOUND} floors plus compute", median(bounds), 1.0, at_most=True))
        figures = {
            "floor ms": least,
            "compute ms": median(run.compute for run in runs),
            "prefill ms": median(run.total for run in runs),
        }
        times = {name: 1e3 * seconds for name, seconds in figures.items()}
        over = (times["prefill ms"] - times["compute ms"]) / times["floor ms"]
        rows.append(
            {"network": about, "collective": runs[0].collective} | times | {"(prefill - compute) / floor": over}
        )
    return Result("A prompt on four devices", NOTES, [Table("", rows)], checks)


SHIPPED = ("lan-10ms-1gb", "lan-10ms-100mb", "paper-4-laptops")


def floor(topology: Topology) -> float:
    """Return the seconds that a prompt's bytes take over the links, with the latencies that no collective avoids."""
    links = specified_links(topology)
    sums = 2 * LAYERS * min(predict(name, links, PROMPT * HIDDEN, "bf16") for name in PREDICTIONS)
    embedded = 4 * PROMPT * HIDDEN * (links.size - 1) / links.bytes_per_s(0)
    return sums + embedded + max(links.between(0, rank).latency_s for rank in range(1, links.size))


def _measure(place: Home) -> Prefill:
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        said = place.bench(MODEL, "--prompt-tokens", PROMPT, "--gen-tokens", 2, "--repeat", 1, "--trace", trace)
        events = json.loads(trace.read_text())["traceEvents"]
    return Prefill(said["ttft_s"], slowest_compute(events, before_last=1), said["prefill_collective"])


def slowest_compute(events: list[dict[str, Any]], before_last: int) -> float:
    """Return the slowest device's compute in seconds, summed over the blocks of one step.

    The step is `before_last` steps before the last.
    """
    devices: dict[int, list[float]] = {}  # by pid, in the order of time
    names: dict[int, str] = {}  # of the last block of each
    for event in events:
        if event.get("cat") == "compute" and event["name"] not in (EMBEDDING, HEAD):
            pid, seconds = event["pid"], float(event["dur"]) / 1e6
            times = devices.setdefault(pid, [])
            if names.get(pid) == event["name"]:
                times[-1] += seconds  # the second lane of the same block
            else:
                times.append(seconds)
            names[pid] = event["name"]
    blocks = 2 * LAYERS
    steps = [times[len(times) - (before_last + 1) * blocks :][:blocks] for times in devices.values()]
    slowest: list[float] = [max(times) for times in zip(*steps, strict=True)]
    return sum(slowest)
