"""The C++ kernels, with the functions of `reference`: keeps a native plan with each spec and allocates the results.

All checks of dtype, shape, alignment and contiguity are in C++ and raise `KernelError`. Calls release the interpreter's
lock and use one pool of threads per process; calls from several Python threads take turns.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from tpi.errors import KernelError
from tpi.kernels import _native, reference
from tpi.kernels.spec import F32, I32, U8, AttentionSpec, Batch, FfnSpec, KvArray, Residual, Stage
from tpi.pack.layout import RunLayout

_PLAN = "native plan"  # under which a spec carries its plan, and drops it when it goes


def set_threads(count: int) -> None:
    """Use `count` threads, the caller's included, for every later call.

    Raises:
        KernelError: unless 1 to 1024, or if the system does not start them; then it is one.
    """
    _native.set_threads(count)


def threads() -> int:
    """How many threads take part in a call."""
    return _native.threads()


def isa() -> str:
    """Name of the instruction set in use."""
    return _native.isa()


def available_isas() -> list[str]:
    """Names of the instruction sets that this machine and this build have, the best first."""
    return _native.available_isas()


def use_isa(name: str) -> None:
    """Use another instruction set for every later call; KernelError if this machine lacks it."""
    _native.use_isa(name)


def read(data: U8) -> None:
    """Read 1-D bytes with all threads and do nothing else: the bandwidth that the kernels are compared with."""
    _native.read(data)


def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    """`x / sqrt(mean(x^2) + eps) * weight`; `x` is `[tokens, hidden]`, `weight` `[hidden]`."""
    return _norm(x, ("rms", eps, weight, None))


def layer_norm(x: F32, weight: F32, bias: F32 | None, eps: float) -> F32:
    """`(x - mean) / sqrt(variance + eps) * weight + bias`; `x` is `[tokens, hidden]`, vectors `[hidden]`."""
    return _norm(x, ("layer", eps, weight, bias))


def attention(spec: AttentionSpec, data: U8, x: F32, k: KvArray, v: KvArray, batch: Batch) -> F32:
    """See `tpi.kernels.attention`."""
    plan = _plan_attention(spec)
    out = np.empty(x.shape, np.float32)
    plan.run(data, x, k, v, batch.positions, batch.sequence, batch.tables, out)
    return out


def ffn(spec: FfnSpec, data: U8, x: F32, active: I32 | None = None) -> F32:
    """See `tpi.kernels.ffn`."""
    plan = _plan_ffn(spec)
    out = np.empty(x.shape, np.float32)
    plan.run(data, x, active, out)
    return out


def add_residual(residual: Residual, x: F32, total: F32) -> F32:
    """`x` + the sum of all nodes' shares of a half-block; `x` and `total` are `[tokens, hidden]`."""
    return reference.add_residual(residual, x, total, rms_norm)


class Chain:
    """See `tpi.kernels.Chain`."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        """Raises KernelError if half-blocks differ in hidden size, or an array does not fit its plan."""
        self._native = _native.Chain(len(stages[0].spec.norm_weight) if stages else 0)
        for stage in stages:
            residual = (stage.residual.bias, stage.residual.post_norm, stage.residual.eps)
            if isinstance(stage.spec, FfnSpec):
                self._native.ffn(_plan_ffn(stage.spec), stage.data, residual)
            else:
                self._native.attention(_plan_attention(stage.spec), stage.data, stage.keys, stage.values, residual)

    def run(self, x: F32, batch: Batch) -> F32:
        """See `tpi.kernels.Chain.run`."""
        out: F32 = x.copy()
        self._native.run(out, batch.positions, batch.sequence, batch.tables, np.empty_like(out))
        return out


def logits(run: RunLayout, data: U8, x: F32) -> F32:
    """`x` times every row of a table run, `[tokens, units * width]`."""
    out = np.empty((len(x), run.units * run.width), np.float32)
    _plan_run(run).rows(data, x, out)
    return out


def gather(run: RunLayout, data: U8, rows: I32) -> F32:
    """Rows of a table run, `[len(rows), hidden]` float32."""
    out = np.empty((len(rows), run.hidden), np.float32)
    _plan_run(run).gather(data, rows, out)
    return out


def dequantise(run: RunLayout, data: U8, part: str) -> F32:
    """The vectors of one part of a run, `[units * width, hidden]` float32."""
    out = np.empty((run.units * run.width, run.hidden), np.float32)
    _plan_run(run).decode(data, part, out)
    return out


def _norm(x: F32, norm: _native.NormFields) -> F32:
    out = np.empty(x.shape, np.float32)
    _native.norm(x, norm, out)
    return out


def _fields(run: RunLayout) -> _native.RunFields:
    parts = [(part.name, str(part.format), str(part.axis)) for part in run.parts]
    return (run.layout == "tiled", run.units, run.width, run.hidden, parts)


@lru_cache(maxsize=64)
def _plan_run(run: RunLayout) -> _native.RunPlan:
    return _native.RunPlan(_fields(run))


def _plan_attention(spec: AttentionSpec) -> _native.AttentionPlan:
    plan: _native.AttentionPlan | None = vars(spec).get(_PLAN)
    if plan is None:
        plan = vars(spec)[_PLAN] = _native.AttentionPlan(
            _fields(spec.query),
            _fields(spec.kv),
            (spec.norm, spec.norm_eps, spec.norm_weight, spec.norm_bias),
            (spec.heads, spec.kv_heads, spec.head_dim),
            spec.kv_index,
            (spec.q_bias, spec.k_bias, spec.v_bias, spec.q_norm, spec.k_norm, spec.inv_freq),
            (spec.rope_scale, spec.attention_scale, spec.softcap, spec.window),
        )
    return plan


def _plan_ffn(spec: FfnSpec) -> _native.FfnPlan:
    plan: _native.FfnPlan | None = vars(spec).get(_PLAN)
    if plan is None:
        norm = (spec.norm, spec.norm_eps, spec.norm_weight, spec.norm_bias)
        plan = vars(spec)[_PLAN] = _native.FfnPlan(
            _fields(spec.neuron), norm, spec.activation, spec.gated, spec.gate_bias, spec.up_bias
        )
    return plan


def _usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _start_threads() -> None:
    """One thread for each core, or one alone and a word on why: `set_threads` may still ask for fewer."""
    try:
        set_threads(min(_usable_cores(), 1024))
    except KernelError as error:
        sys.stderr.write(f"tpi: computing with one thread: {error}\n")


_start_threads()
