"""Attention of new tokens over keys and values in memory, against plain reading of that memory, in the same run."""

import time
from collections.abc import Callable
from statistics import median

import numpy as np

from benchmarks.result import Check, Result, Row, Table
from tpi.kernels.kv import KvDtype
from tpi.kernels.native import NativeKernels
from tpi.system.machine import usable_cores
from worker.measure.attention import MIXTRAL, AttentionSample, Heads

ROUNDS, QUICK_ROUNDS = 30, 4
SHARE = 0.8  # of the speed of reading
SEQUENCES = 16
SHAPES = {
    "Mixtral 8x7B": (MIXTRAL, 2040),
    "SmolLM2-135M": (Heads(9, 3, 64), 8184),
    "Llama 2 7B": (Heads(32, 32, 128), 1016),
}  # heads, and tokens of each sequence: more bytes than CPU caches hold
FORMATS: tuple[KvDtype, ...] = ("f16", "q8", "f32")
NOTES = f"""
`tpi.kernels.Kernels.attend`, {{isa}}, {{threads}} threads. One new token of each of {SEQUENCES} sequences attends to
all tokens before it, as in a batch. Before every call the same threads read the same keys and values and do nothing
else. A share is the bytes per second of a call divided by those of the reading just before it, the median over
{{rounds}} rounds without the first. The three shapes have
4, 3 and 1 query heads for each KV head, and heads of 128, 64 and 128 values.
"""


def bench(quick: bool) -> Result:
    """Measure attention, one row per model and format."""
    kernels, rounds = NativeKernels(), QUICK_ROUNDS if quick else ROUNDS
    kernels.set_threads(usable_cores())
    rows, checks = list[Row](), list[Check]()
    for model, (heads, context) in SHAPES.items():
        for kv_dtype in FORMATS:
            row, share = _compared(kernels, AttentionSample.of(heads, kv_dtype, SEQUENCES, context), rounds)
            rows.append({"heads of": model, "keys and values": kv_dtype, **row})
            if kv_dtype != "f32":
                checks.append(Check(f"{model}, {kv_dtype}: share of the speed of reading", share, SHARE))
    notes = NOTES.format(isa=kernels.isa(), threads=kernels.threads(), rounds=rounds)
    return Result("Attention on the CPU", notes, [Table("GB/s of keys and values, medians", rows)], checks)


def _compared(kernels: NativeKernels, sample: AttentionSample, rounds: int) -> tuple[Row, float]:
    """Measure plain reading and attention in turn. Return a row of medians, and the median ratio of the two speeds."""
    caches = [cache.view(np.uint8).reshape(-1) for cache in (sample.pages.keys[0], sample.pages.values[0])]

    def read() -> None:
        for cache in caches:
            kernels.read(cache)

    size = sum(cache.size for cache in caches)
    turns = [(_speed(read, size), _speed(lambda: sample.run(kernels), sample.nbytes)) for _ in range(rounds + 1)][1:]
    share = median(attending / reading for reading, attending in turns)
    reading, attending = (median(each) / 1e9 for each in zip(*turns, strict=True))
    return {"read": reading, "attended": attending, "share": share}, share


def _speed(call: Callable[[], object], nbytes: int) -> float:
    """Return the bytes per second of `call`, which reads `nbytes` bytes."""
    begun = time.perf_counter()
    call()
    return nbytes / (time.perf_counter() - begun)
