"""Figures 14 and 16 of PowerInfer on this machine's CPU: batches of sequences, and the sparse operator alone."""

import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.result import Check, Result, Row, Table
from benchmarks.support.models import reglu_layers
from master.generation.engine import Engine
from master.generation.request import Request
from master.vocabulary.sampler import Sampler, Sampling
from tests.support.cluster.inprocess import in_process_deployment
from tpi.config import Format
from tpi.kernels.native import NativeKernels
from tpi.kernels.spec import FfnSpec, NormSpec
from tpi.pack.groups import quantise_groups
from tpi.pack.layout import Part, RunLayout
from tpi.pack.reader import Pack
from tpi.sparsity.files import NAME, load_predictors

SIZE, SPARSITIES, CALLS = 4096, (0.0, 0.1, 0.3, 0.5, 0.7, 0.87, 0.95, 0.99), 25
BATCHES, STEPS, CONTEXT = (1, 2, 4, 8, 16, 32), 12, 64
LINEAR = 1.5  # bound: time of half of the neurons, as a multiple of half of the time of all
NOTES = f"""
**Figure 16**: PowerInfer multiplies a [4096, 4096] matrix by a vector, with rows of zeros. Here it is a feed-forward
block with as many weights: {SIZE // 2} neurons with {SIZE} inputs and outputs in float32, and also in 4 bits.
*torch dense* and *torch sparse* multiply by the same two matrices, dense, and as CSR without the rows and columns that
are zero. Figures are milliseconds, the least of {CALLS} interleaved calls. PIT is not compared, because this machine
has no card.

**Figure 14**: eight layers of the 1.1B ReGLU shape in 4 bits, about 10% of the neurons active, on the CPU. The
sequences of a batch differ, and a step computes the union of their active neurons; from 9 sequences on it computes all.
The baseline is the same engine with all neurons, not llama.cpp. Figures are the least of three interleaved runs of
{STEPS} steps each.
"""


def bench(quick: bool) -> Result:
    """Measure operators and batches."""
    operators = operator_rows(3 if quick else CALLS)
    batches = batch_rows(BATCHES[:3] if quick else BATCHES)
    whole, half = (float(row["active neurons"]) for row in (operators[0], operators[3]))
    crossing = [
        float(row["sparsity"]) for row in operators if float(row["active neurons"]) <= float(row["all neurons"])
    ]
    checks = [
        Check("half of the neurons over half of the time of all", 2 * half / whole, LINEAR, at_most=True),
        Check("sparsity from which active neurons alone are faster", min(crossing, default=1.0), 0.5, at_most=True),
        Check("gain of one sequence", float(batches[0]["gain"]), 1.5),
    ]
    tables = [Table("Figure 16: the operator", operators), Table("Figure 14: batches", batches)]
    return Result("PowerInfer's operator and batches", NOTES, tables, checks)


def operator_rows(calls: int) -> list[Row]:
    """Return the milliseconds of one block by sparsity, with all contenders in turn."""
    import torch

    warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
    random, kernels = np.random.default_rng(0), NativeKernels()
    up, down = (random.standard_normal((SIZE // 2, SIZE)).astype(np.float32) / 64 for _ in range(2))
    x = random.standard_normal((1, SIZE)).astype(np.float32)
    blocks = {format: _block(format, up, down) for format in ("f32", "q4")}
    there = torch.from_numpy(x.T.copy())
    rows: list[Row] = []
    for sparsity in SPARSITIES:
        active = np.sort(random.permutation(SIZE // 2)[: round((1 - sparsity) * (SIZE // 2))]).astype(np.int32)
        zeroed = [np.zeros_like(each) for each in (up, down)]
        for target, source in zip(zeroed, (up, down), strict=True):
            target[active] = source[active]
        first, second = torch.from_numpy(zeroed[0]), torch.from_numpy(zeroed[1].T.copy())
        sparse = first.to_sparse_csr(), second.to_sparse_csr()
        cases: dict[str, Callable[[], object]] = {
            "torch dense": _torch(first, second, there),
            "torch sparse": _torch(*sparse, there),
            "all neurons": _ours(kernels, *blocks["f32"], x, None),
            "active neurons": _ours(kernels, *blocks["f32"], x, active),
            "q4, all": _ours(kernels, *blocks["q4"], x, None),
            "q4, active": _ours(kernels, *blocks["q4"], x, active),
        }
        rows.append({"sparsity": sparsity, **{name: 1e3 * taken for name, taken in _by_turns(cases, calls).items()}})
    return rows


def _torch(first: Any, second: Any, x: Any) -> Callable[[], object]:
    return lambda: second @ (first @ x).relu()


def _ours(kernels: NativeKernels, spec: FfnSpec, data: Any, x: Any, active: Any) -> Callable[[], object]:
    return lambda: kernels.ffn(spec, data, x, active)


def _block(format: Format, up: Any, down: Any) -> tuple[FfnSpec, Any]:
    """Make a feed-forward block of the matrices `up` and `down`, `[neurons, hidden]`, in the record layout."""
    run = RunLayout(
        "neuron", "record", (Part("up", format, "row"), Part("down", format, "column")), 32, SIZE, len(up) // 32
    )
    parts = [each if format == "f32" else quantise_groups(format, each).reshape(len(each), -1) for each in (up, down)]
    data = np.concatenate([np.ascontiguousarray(part).view(np.uint8).reshape(len(part), -1) for part in parts], axis=1)
    spec = FfnSpec(run, "relu", False, NormSpec("rms", 1e-5, np.ones(SIZE, np.float32)), None, None)
    return spec, np.ascontiguousarray(data).reshape(-1)


def _by_turns(cases: dict[str, Callable[[], object]], calls: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(calls + 1):
        for name, call in cases.items():
            began = time.perf_counter()
            call()
            if turn:  # the first warms up
                times[name].append(time.perf_counter() - began)
    return {name: min(taken) for name, taken in times.items()}


def batch_rows(batches: tuple[int, ...]) -> list[Row]:
    """Return tokens per second by batch size, with all neurons and with the predicted ones."""
    pack = Pack.open(reglu_layers().path)
    predictors = load_predictors(pack.path / NAME)
    rows: list[Row] = []
    with ExitStack() as stack:
        cache = Path(stack.enter_context(TemporaryDirectory()))
        more: dict[str, Any] = {"context": CONTEXT, "pool": max(batches) * CONTEXT // 32}
        made = [
            in_process_deployment(pack, [1.0], cache / "all", sparsity="off", **more),
            in_process_deployment(pack, [1.0], cache / "active", predictors=predictors, sparsity="static", **more),
        ]
        engines = [Engine(stack.enter_context(closing(each))) for each in made]
        for batch in batches:
            dense, sparse = (min(each) for each in zip(*[_pair(engines, batch) for _ in range(3)], strict=True))
            rows.append({"sequences": batch, "all, tok/s": batch / dense, "active, tok/s": batch / sparse,
                         "gain": dense / sparse})  # fmt: skip
    return rows


def _pair(engines: list[Engine], batch: int) -> list[float]:
    return [_step_seconds(engine, batch) for engine in engines]


def _step_seconds(engine: Engine, batch: int) -> float:
    sequences = [engine.admit([3 + 61 * number, 4 + 37 * number]) for number in range(batch)]
    for sequence in sequences:
        engine.submit(Request(sequence, Sampler(Sampling(temperature=0)), STEPS + 4, lambda sampled: True))
    for _ in range(3):
        engine.step()  # prompts
    began = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    taken = (time.perf_counter() - began) / STEPS
    while engine.requests:
        engine.step()
    for sequence in sequences:
        engine.release(sequence)
    return taken
