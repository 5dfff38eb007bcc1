"""Speed of a model split over 1, 2, 4 and 8 devices of a fifth of a core, by heads and neurons or by layers."""

from collections.abc import Callable
from pathlib import Path

from benchmarks.network import layerwise
from benchmarks.network.awake import awake
from benchmarks.network.home import MEGABIT, MILLISECOND, home, wheel
from benchmarks.result import Bars, Check, Result, Row, Table
from benchmarks.support.models import llama_1b
from testbed.launch import Testbed
from tests.support.weights.shapes import LLAMA_1B, write_huggingface
from tpi.config import default_cache
from tpi.topology.topology import UNLIMITED

SIZES = (1, 2, 4, 8)
CPU = 0.2
LATENCY, BANDWIDTH = 1 * MILLISECOND, 1000 * MEGABIT
PROMISED = 2.5
WORK = ("--prompt-tokens", 2, "--gen-tokens", 8, "--repeat", 3)
SEEDING = ("--prompt-tokens", 1, "--gen-tokens", 2, "--repeat", 1)
NOTES = """
The 1.1B Llama shape with random weights, held in memory, on devices of 0.2 core (1 ms in every 5 ms) around a router:
1 Gbit, 1 ms from device to device. *Tensor parallel* is `tpi bench`, with the collective that it chose. *Layer-wise*
is model parallelism as in figure 6 of the TPI-LLM paper: a pipeline of real processes
(`benchmarks/network/layerwise.py`) on the same devices and links, with the same kernels. Each process computes whole
layers and sends the hidden state to the next over plain TCP. With one sequence only one device works at a time. The f32
pack is 4.4 GB, and computing dominates. In 4 bits (0.6 GB) a token takes a fraction of that time, and on eight devices
its 44 sums dominate. A device that has used up its millisecond answers up to 4 ms later, so a sum takes longer than its
latency. Figures are the median of three answers. Eight devices use 1.6 of two cores, so other load on the host shows.
Processors are prevented from sleeping (`benchmarks/network/awake.py`).
"""


@awake()
def bench(quick: bool) -> Result:
    """Measure two formats and two ways to split, on each number of devices."""
    models: dict[str, Callable[[], tuple[Path, str]]] = {"q4": lambda: (llama_1b().path, "auto")}
    if not quick:
        models = {"f32": lambda: (huggingface(), "f32")} | models
    rows: list[Row] = []
    rates: dict[str, list[float]] = {}
    for name, make in models.items():
        model, dtype = make()
        measured = [_measure(str(model), dtype, size) | {"format": name} for size in SIZES]
        rows += [_compared(row, measured[0]) for row in measured]
        for way in ("tensor parallel", "layer-wise"):
            rates[f"{name}, {way}"] = [float(row[way]) for row in measured]
    tables = [Table("Tokens/s", rows)]
    plot = Bars("1.1B on devices of 0.2 core", "tokens/s", [f"{size} devices" for size in SIZES], rates)
    return Result("Tensor parallelism on slow devices", NOTES, tables, _checks(rates), [plot])


def huggingface() -> Path:
    """Write the 1.1B shape in float32, unless it exists."""
    return write_huggingface(default_cache() / "benchmarks" / "llama-1.1b-f32", dict(LLAMA_1B))


def _checks(rates: dict[str, list[float]]) -> list[Check]:
    return [
        Check(f"{name}, {SIZES[-1]} devices: times one device", column[-1] / column[0], PROMISED)
        for name, column in rates.items() if name == "f32, tensor parallel"
    ]  # fmt: skip


def _measure(model: str, dtype: str, size: int) -> dict[str, str | int | float]:
    flags = ("--dtype", dtype)
    if size > 1:  # sending the weights to such slow devices would take longer than the benchmark
        with home(wheel(size, 0.0, UNLIMITED), shaped=False) as fast:
            fast.bench(model, *flags, *SEEDING)
    topology = wheel(size, LATENCY, BANDWIDTH, CPU)
    with home(topology) as slow:
        said = slow.bench(model, *flags, *WORK)
    with Testbed.start(topology) as bed:
        by_layers = layerwise.measure(bed, model, dtype, tokens=5)
    node = said["nodes"][0]
    return {
        "format": "",
        "devices": size,
        "tensor parallel": said["decode_tokens_per_s"],
        "layer-wise": 1 / by_layers,
        "collective": said["collective"],
        "compute ms/token": node["compute_ms_per_token"],
        "sync ms/token": node["sync_ms_per_token"],
        "MB per device": node["weight_bytes"] / 1e6,
    }


def _compared(row: dict[str, str | int | float], one: dict[str, str | int | float]) -> Row:
    return row | {"times one device": float(row["tensor parallel"]) / float(one["tensor parallel"])}
