"""Every kernel in plain numpy: the meaning of the native ones.

Weights in q8, q4 and q4s meet activations rounded in groups of 32 (to int8; for q8 to 15 bits), as in the native
kernels: row parts always, column parts where the layout is tiled. (In records the native 4-bit columns round activation
times scale to int8 over 8 neurons at a time; the reference does not follow that.) Slow and simple; each call
dequantises what it reads.
"""

from collections.abc import Sequence

import numpy as np

from tpi.errors import KernelError
from tpi.kernels.arithmetic import (
    activate,
    apply_norm,
    biased,
    check_data,
    check_input,
    check_range,
    columns,
    dequantise,
    rms_norm,
    rows,
)
from tpi.kernels.paged import append, attend, heads_of, rope
from tpi.kernels.spec import F32, I32, U8, AttentionSpec, Batch, FfnSpec, KvArray, NormSpec, Residual, Stage
from tpi.pack.layout import RunLayout


class ReferenceKernels:
    """The kernels in numpy. See `tpi.kernels.Kernels` for what each does."""

    def set_threads(self, count: int) -> None:
        """The reference leaves threads to BLAS; `count` is ignored."""

    def threads(self) -> int:
        """One, as far as anybody here knows."""
        return 1

    def isa(self) -> str:
        """There is one way to compute in numpy."""
        return "numpy"

    def read(self, data: U8) -> None:
        """See `tpi.kernels.Kernels`."""
        data.max(initial=0)

    def norm(self, norm: NormSpec, x: F32) -> F32:
        """See `tpi.kernels.Kernels`."""
        return apply_norm(norm, x)

    def attention(self, spec: AttentionSpec, data: U8, x: F32, keys: KvArray, values: KvArray, batch: Batch) -> F32:
        """See `tpi.kernels.Kernels`.

        Norms `x`, projects it to q, k and v, rotates, appends k and v to the paged cache, attends, projects with o.
        """
        tokens = check_input(x, spec.hidden)
        split = spec.query.units * spec.query.unit_bytes
        check_data(data, split + spec.kv.units * spec.kv.unit_bytes)
        query_data, kv_data = data[:split], data[split:]
        normed = apply_norm(spec.norm, x)
        q = heads_of(rows(spec.query, query_data, "q", normed), spec.q_bias, spec.heads, spec.head_dim)
        k = heads_of(rows(spec.kv, kv_data, "k", normed), spec.k_bias, spec.kv_heads, spec.head_dim)
        v = heads_of(rows(spec.kv, kv_data, "v", normed), spec.v_bias, spec.kv_heads, spec.head_dim)
        if spec.q_norm is not None:
            q = rms_norm(q, spec.q_norm, spec.norm.eps)
        if spec.k_norm is not None:
            k = rms_norm(k, spec.k_norm, spec.norm.eps)
        append(keys, rope(spec, k, batch.positions), batch)
        append(values, v, batch)
        mixed = attend(spec, rope(spec, q, batch.positions), keys, values, batch)
        padded = np.zeros((tokens, spec.query.units * spec.query.width), np.float32)
        padded[:, : spec.heads * spec.head_dim] = mixed.reshape(tokens, -1)
        return columns(spec.query, query_data, "o", padded)

    def ffn(self, spec: FfnSpec, data: U8, x: F32, active: I32 | None = None) -> F32:
        """See `tpi.kernels.Kernels`."""
        run = spec.neuron
        check_input(x, spec.hidden)
        check_data(data, run.units * run.unit_bytes)
        normed = apply_norm(spec.norm, x)
        up = biased(rows(run, data, "up", normed), spec.up_bias)
        gate = biased(rows(run, data, "gate", normed), spec.gate_bias) if spec.gated else None
        inner = activate(spec, gate, up)
        return columns(run, data, "down", inner if active is None else _only(run, active, inner))

    def add_residual(self, residual: Residual, x: F32, total: F32) -> F32:
        """See `tpi.kernels.Kernels`."""
        total = biased(total, residual.bias)
        if residual.post_norm is not None:
            total = rms_norm(total, residual.post_norm, residual.eps)
        return x + total

    def open_chain(self, stages: Sequence[Stage]) -> "ReferenceChain":
        """See `tpi.kernels.Kernels`."""
        return ReferenceChain(self, stages)

    def logits(self, run: RunLayout, data: U8, x: F32) -> F32:
        """See `tpi.kernels.Kernels`."""
        return rows(run, data, run.parts[0].name, x)

    def gather(self, run: RunLayout, data: U8, rows: I32) -> F32:
        """See `tpi.kernels.Kernels`."""
        check_range("row", rows, run.units * run.width)
        return np.ascontiguousarray(dequantise(run, data, run.parts[0].name)[rows])

    def dequantise(self, run: RunLayout, data: U8, part: str) -> F32:
        """See `tpi.kernels.Kernels`."""
        return dequantise(run, data, part)


class ReferenceChain:
    """See `tpi.kernels.Chain`."""

    def __init__(self, kernels: ReferenceKernels, stages: Sequence[Stage]) -> None:
        self._kernels = kernels
        self._stages = stages

    def run(self, x: F32, batch: Batch) -> F32:
        """See `tpi.kernels.Chain.run`."""
        for stage in self._stages:
            x = self._kernels.add_residual(stage.residual, x, self._partial(stage, x, batch))
        return x

    def _partial(self, stage: Stage, x: F32, batch: Batch) -> F32:
        if isinstance(stage.spec, FfnSpec):
            return self._kernels.ffn(stage.spec, stage.data, x)
        assert stage.keys is not None  # attention has both
        assert stage.values is not None
        return self._kernels.attention(stage.spec, stage.data, x, stage.keys, stage.values, batch)


def _only(run: RunLayout, active: I32, inner: F32) -> F32:
    """`inner` `[tokens, neurons]` with zeros where a neuron is not active."""
    if run.layout != "record":
        raise KernelError("a list of active neurons needs a pack in the record layout; this one is tiled")
    check_range("active neuron", active, run.units * run.width)
    mask = np.zeros(run.units * run.width, np.bool_)
    mask[active] = True
    return np.where(mask, inner, np.float32(0))
