"""Speed of the native kernels against the memory's own read bandwidth, with both measured in turn.

    python -m benchmarks.speed.kernels [--threads N] [--rounds N] [--json]

Weights rotate over 512 MiB, so that no CPU cache holds them. Each figure is the median of the rounds, next to the best
round. On a shared machine the best round shows the speed of the code, and the median includes other load.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import cycle

import numpy as np
import numpy.typing as npt

from tpi.config import Format
from tpi.kernels.native import NativeKernels
from tpi.kernels.spec import FfnSpec, NormSpec
from tpi.pack.layout import Layout, Part, RunLayout
from tpi.system.machine import usable_cores

U8 = npt.NDArray[np.uint8]
POOL_BYTES = 512 << 20
CALL_BYTES = 16 << 20  # a call reads about this much, so that its overhead does not count
TILED: tuple[Format, ...] = ("q4", "q4s", "q8")
PLAIN: tuple[Format, ...] = ("f32", "bf16")
SHAPES = ((4096, 4096), (11008, 4096), (1536, 576))
SPARSE = (4096, 11008)  # hidden, neurons
FRACTIONS = (1.0, 0.5, 0.1, 0.01)
native = NativeKernels()
PRODUCTS = ((4096, 4096), (5632, 2048), (1536, 576))


@dataclass(frozen=True)
class Figure:
    """One row of the table; `value` is the median of the rounds, in `unit`."""

    name: str
    value: float
    best: float
    unit: str


class Pool:
    """A buffer of bytes that are small weights in every format. Each call of `take` returns the next bytes."""

    def __init__(self) -> None:
        # no byte above 0x21: an f16 scale of any two of them is small and finite
        self._bytes = np.random.default_rng(0).integers(0, 0x22, POOL_BYTES, dtype=np.uint8)
        self._at = 0

    def take(self, count: int) -> U8:
        """Return the next `count` bytes. After the end of the buffer, begin again at its start."""
        if self._at + count > len(self._bytes):
            self._at = 0
        self._at += count
        return self._bytes[self._at - count : self._at]


Case = tuple[int, Callable[[U8], object]]  # bytes of weights, the call


def interleave(pool: Pool, cases: dict[str, Case], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every case in every round, with the cases in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds + 1):
        for name, (count, call) in cases.items():
            data = pool.take(count)
            start = time.perf_counter()
            call(data)
            seconds[name].append(time.perf_counter() - start)
    return {name: taken[1:] for name, taken in seconds.items()}


def figure(name: str, amount: float, seconds: list[float], unit: str) -> Figure:
    """Return a figure of `amount` per second."""
    return Figure(name, amount / float(np.median(seconds)), amount / min(seconds), unit)


def matrix_case(format: Format, layout: Layout, outputs: int, inputs: int, tokens: int, call_bytes: int) -> Case:
    """Make a product of a matrix and `tokens` vectors; stack small matrices up to `call_bytes`."""
    run = RunLayout("row", layout, (Part("row", format, "row"),), 32, inputs, outputs // 32)
    run = replace(run, units=run.units * max(1, call_bytes // (run.units * run.unit_bytes)))
    x = np.random.default_rng(1).normal(size=(tokens, inputs)).astype(np.float32)
    return run.units * run.unit_bytes, lambda data: native.logits(run, data, x)


def bandwidth(pool: Pool, rounds: int) -> list[Figure]:
    """Measure the GB/s of matrix-vector products from memory, and of plain reading."""
    cases: dict[str, Case] = {"read": (CALL_BYTES, native.read)}
    for format in TILED:
        for outputs, inputs in SHAPES:
            cases[f"{format} {outputs}x{inputs}"] = matrix_case(format, "tiled", outputs, inputs, 1, CALL_BYTES)
    for format in PLAIN:
        cases[f"{format} 4096x4096"] = matrix_case(format, "record", 4096, 4096, 1, CALL_BYTES)
    seconds = interleave(pool, cases, rounds)
    return [figure(name, cases[name][0] / 1e9, taken, "GB/s") for name, taken in seconds.items()]


def products(pool: Pool, rounds: int) -> list[Figure]:
    """Measure the GFLOP/s of matrix products with several tokens."""
    cases: dict[str, Case] = {}
    work: dict[str, float] = {}
    formats: tuple[tuple[Format, Layout], ...] = (("q4", "tiled"), ("q8", "tiled"), ("f32", "record"))
    for format, layout in formats:
        for outputs, inputs in PRODUCTS:
            for tokens in (4, 32, 128, 512):
                name = f"{format} {outputs}x{inputs} x {tokens}"
                cases[name] = matrix_case(format, layout, outputs, inputs, tokens, 0)
                work[name] = 2e-9 * outputs * inputs * tokens
    seconds = interleave(pool, cases, rounds)
    return [figure(name, work[name], taken, "GFLOP/s") for name, taken in seconds.items()]


def ffn_case(layout: Layout, active: int | None) -> Case:
    """Make a q4 feed-forward block with `active` active neurons (None: all, without a list)."""
    hidden, neurons = SPARSE
    parts = (Part("gate", "q4", "row"), Part("up", "q4", "row"), Part("down", "q4", "column"))
    run = RunLayout("neuron", layout, parts, 32, hidden, neurons // 32)
    spec = FfnSpec(run, "silu", True, NormSpec("rms", 1e-5, np.ones(hidden, np.float32)), None, None)
    random = np.random.default_rng(2)
    x = random.normal(size=(1, hidden)).astype(np.float32)
    lists = cycle(
        [None if active is None else np.sort(random.permutation(neurons)[:active]).astype(np.int32) for _ in range(32)]
    )

    def call(data: U8) -> object:
        return native.ffn(spec, data, x, next(lists))

    return run.units * run.unit_bytes, call


def sparse(pool: Pool, rounds: int) -> list[Figure]:
    """Measure feed-forward blocks with a list of active neurons.

    The times are shares of the time with all neurons active, and of the dense pack's time.
    """
    cases = {"dense pack": ffn_case("tiled", None)}
    cases |= {f"{fraction:.0%} active": ffn_case("record", int(SPARSE[1] * fraction)) for fraction in FRACTIONS}
    seconds = interleave(pool, cases, rounds)
    figures = [figure("dense pack", 1e-3, seconds["dense pack"], "1/ms")]
    whole = seconds[f"{1:.0%} active"]
    for name, taken in seconds.items():
        base = seconds["dense pack"] if taken is whole else whole
        unit = "x dense pack" if taken is whole else "x all active"
        if name != "dense pack":
            figures.append(Figure(name, float(np.median(taken) / np.median(base)), min(taken) / min(base), unit))
    return figures


def main() -> None:
    """Measure and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    native.set_threads(options.threads)
    pool = Pool()
    tables = {
        "matrix-vector": bandwidth(pool, options.rounds),
        "matrix product": products(pool, max(3, options.rounds // 4)),
        "sparse FFN": sparse(pool, options.rounds),
    }
    if options.json:
        rows = {title: [asdict(row) for row in figures] for title, figures in tables.items()}
        print(json.dumps({"isa": native.isa(), "threads": options.threads, "tables": rows}))
        return
    print(f"{native.isa()}, {options.threads} threads; median of {options.rounds} rounds (best)")
    for title, figures in tables.items():
        print(f"\n{title}")
        for row in figures:
            print(f"  {row.name:24} {row.value:8.3g} {row.unit:12} ({row.best:.3g})")


if __name__ == "__main__":
    main()
