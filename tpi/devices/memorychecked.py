"""Kernels of a device that is emulated in host memory: they refuse arrays that a real accelerator could not read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpi.devices.arena import Arena
from tpi.errors import KernelError
from tpi.kernels import Chain, Kernels
from tpi.kernels.spec import (
    F32,
    I32,
    U8,
    AttentionSpec,
    Batch,
    BlockSpec,
    ChainBlock,
    ExpertsSpec,
    FfnSpec,
    Input,
    KvArray,
    NormSpec,
    Prepared,
    Projected,
    RecurrentSpec,
    Residual,
    RouterSpec,
    Routing,
)
from tpi.pack.layout import RunLayout


@dataclass(frozen=True)
class MemoryCheckedPrepared:
    """A block's input that only the kernels of one device accept (`tpi.kernels.spec.Prepared`)."""

    inner: Prepared
    memory: Arena

    @property
    def shape(self) -> tuple[int, int]:
        """Number of tokens and hidden size: `(tokens, hidden)`."""
        return self.inner.shape

    def values(self) -> F32:
        """Return a copy of the normed input, `[tokens, hidden]`."""
        return self.inner.values()


class MemoryCheckedKernels:
    """Kernels that check that their arrays are in a device's memory before they call the wrapped kernels.

    Weights, keys and values outside of the device's memory raise `DeviceError`; input that other kernels prepared
    raises `KernelError`.
    """

    def __init__(self, kernels: Kernels, memory: Arena) -> None:
        self._inner = kernels
        self._memory = memory

    def isa(self) -> str:
        """Return the name of the instruction set in use."""
        return self._inner.isa()

    def set_threads(self, count: int) -> None:
        """Use `count` threads, the caller's included, for every later call."""
        self._inner.set_threads(count)

    def threads(self) -> int:
        """Return the number of threads that take part in a call."""
        return self._inner.threads()

    def read(self, data: U8) -> None:
        """Read the 1-D bytes `data` with all threads and compute nothing, to measure the memory's bandwidth."""
        self._inner.read(self._own("the data", data))

    def norm(self, norm: NormSpec, x: F32) -> F32:
        """Return the norm of the hidden states `x`, float32 `[tokens, hidden]`."""
        return self._inner.norm(norm, x)

    def prepare(self, spec: BlockSpec, x: Input, into: Prepared | None = None) -> MemoryCheckedPrepared:
        """Return the norm of a block's input `x`, rounded if weights are quantised, for all segments of the block."""
        return MemoryCheckedPrepared(self._inner.prepare(spec, self._made(x) or x, self._made(into)), self._memory)

    def attention(self, spec: AttentionSpec, data: U8, x: Input, keys: KvArray, values: KvArray, batch: Batch) -> F32:
        """Return a segment's partial sum of an attention block, float32 `[tokens, hidden]`."""
        self._own("the caches", keys, values)
        return self._inner.attention(spec, self._own("weights", data), self._taken(x), keys, values, batch)

    def project(self, spec: AttentionSpec, data: U8, x: Input, positions: I32) -> Projected:
        """Return the queries, keys and values of the tokens at `positions`."""
        return self._inner.project(spec, self._own("weights", data), self._taken(x), positions)

    def attend(self, spec: AttentionSpec, projected: Projected, keys: KvArray, values: KvArray, batch: Batch) -> F32:
        """Append keys and values to the cache, then return the attention of all heads, `[tokens, heads * head_dim]`."""
        self._own("the caches", keys, values)
        return self._inner.attend(spec, projected, keys, values, batch)

    def output(self, spec: AttentionSpec, data: U8, mixed: F32) -> F32:
        """Return the output projection of `mixed`, the result of `attend`: float32 `[tokens, hidden]`."""
        return self._inner.output(spec, self._own("weights", data), mixed)

    def recur(self, spec: RecurrentSpec, data: U8, x: Input, states: F32, batch: Batch) -> F32:
        """Return a segment's partial sum of a recurrent block, `[tokens, hidden]`, and update `states`."""
        return self._inner.recur(spec, self._own("weights", data), self._taken(x), states, batch)

    def ffn(self, spec: FfnSpec, data: U8, x: Input, active: I32 | None = None) -> F32:
        """Return a segment's partial sum of a feed-forward block, float32 `[tokens, hidden]`."""
        return self._inner.ffn(spec, self._own("weights", data), self._taken(x), active)

    def route(self, router: RouterSpec, x: Input) -> Routing:
        """Return the experts that each token chooses, with their weights."""
        return self._inner.route(router, self._taken(x))

    def experts(self, spec: ExpertsSpec, data: U8, x: Input, routing: Routing) -> F32:
        """Return a segment's partial sum of a block of experts, float32 `[tokens, hidden]`."""
        return self._inner.experts(spec, self._own("weights", data), self._taken(x), routing)

    def expert_pieces(self, spec: ExpertsSpec, data: Mapping[int, U8], x: Input, routing: Routing) -> F32:
        """Return the summed outputs of the expert pieces whose weights are in `data`, float32 `[tokens, hidden]`."""
        self._own("weights", *data.values())
        return self._inner.expert_pieces(spec, data, self._taken(x), routing)

    def add_residual(self, residual: Residual, x: F32, total: F32) -> F32:
        """Return `x` plus the sum over all nodes, `total`, to which bias and norm of `residual` are applied first."""
        return self._inner.add_residual(residual, x, total)

    def open_chain(self, blocks: Sequence[ChainBlock]) -> Chain:
        """Return a chain that runs `blocks` in order."""
        for block in blocks:
            self._own("weights", block.data)
            self._own("the caches", *(cache for cache in (block.keys, block.values) if cache is not None))
        return self._inner.open_chain(blocks)

    def logits(self, run: RunLayout, data: U8, x: F32) -> F32:
        """Return the products of `x` with each row of a table, float32 `[tokens, units * width]`."""
        return self._inner.logits(run, self._own("weights", data), x)

    def gather(self, run: RunLayout, data: U8, rows: I32) -> F32:
        """Return the rows of a table that `rows` lists by number, float32 `[len(rows), hidden]`."""
        return self._inner.gather(run, self._own("weights", data), rows)

    def dequantise(self, run: RunLayout, data: U8, part: str) -> F32:
        """Return the part of a run called `part`, dequantised to float32 `[units * width, hidden]`."""
        return self._inner.dequantise(run, self._own("weights", data), part)

    def _own(self, what: str, *arrays: Any) -> Any:
        for array in arrays:
            self._memory.check(what, array)
        return arrays[0] if arrays else None

    def _made(self, x: object) -> Prepared | None:
        """Return the wrapped kernels' prepared input if these kernels prepared `x`; else None."""
        return x.inner if isinstance(x, MemoryCheckedPrepared) and x.memory is self._memory else None

    def _taken(self, x: Input) -> Input:
        if isinstance(x, np.ndarray):
            return x
        if made := self._made(x):
            return made
        raise KernelError("this input was prepared by other kernels; call prepare() of these kernels")
