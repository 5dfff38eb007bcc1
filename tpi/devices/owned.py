"""Kernels of a device whose memory is the host's underneath: they refuse what a GPU's could not see."""

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
    Residual,
    RouterSpec,
    Routing,
)
from tpi.pack.layout import RunLayout


@dataclass(frozen=True)
class OwnedPrepared:
    """What only the kernels of one device take. See `tpi.kernels.spec.Prepared`."""

    inner: Prepared
    memory: Arena

    @property
    def shape(self) -> tuple[int, int]:
        """`(tokens, hidden)`."""
        return self.inner.shape

    def values(self) -> F32:
        """See `tpi.kernels.spec.Prepared`."""
        return self.inner.values()


class OwnedKernels:
    """Kernels that look where their arrays are. See `tpi.kernels.Kernels` for what each does.

    Weights, keys and values that lie elsewhere raise `DeviceError`; what other kernels prepared, `KernelError`.
    """

    def __init__(self, kernels: Kernels, memory: Arena) -> None:
        self._inner = kernels
        self._memory = memory

    def isa(self) -> str:
        """See `tpi.kernels.Kernels`."""
        return self._inner.isa()

    def set_threads(self, count: int) -> None:
        """See `tpi.kernels.Kernels`."""
        self._inner.set_threads(count)

    def threads(self) -> int:
        """See `tpi.kernels.Kernels`."""
        return self._inner.threads()

    def read(self, data: U8) -> None:
        """See `tpi.kernels.Kernels`."""
        self._inner.read(self._own("the data", data))

    def norm(self, norm: NormSpec, x: F32) -> F32:
        """See `tpi.kernels.Kernels`."""
        return self._inner.norm(norm, x)

    def prepare(self, spec: BlockSpec, x: Input, into: Prepared | None = None) -> OwnedPrepared:
        """See `tpi.kernels.Kernels`."""
        return OwnedPrepared(self._inner.prepare(spec, self._made(x) or x, self._made(into)), self._memory)

    def attention(self, spec: AttentionSpec, data: U8, x: Input, keys: KvArray, values: KvArray, batch: Batch) -> F32:
        """See `tpi.kernels.Kernels`."""
        self._own("the caches", keys, values)
        return self._inner.attention(spec, self._own("weights", data), self._taken(x), keys, values, batch)

    def project(self, spec: AttentionSpec, data: U8, x: Input, positions: I32) -> Projected:
        """See `tpi.kernels.Kernels`."""
        return self._inner.project(spec, self._own("weights", data), self._taken(x), positions)

    def attend(self, spec: AttentionSpec, projected: Projected, keys: KvArray, values: KvArray, batch: Batch) -> F32:
        """See `tpi.kernels.Kernels`."""
        self._own("the caches", keys, values)
        return self._inner.attend(spec, projected, keys, values, batch)

    def output(self, spec: AttentionSpec, data: U8, mixed: F32) -> F32:
        """See `tpi.kernels.Kernels`."""
        return self._inner.output(spec, self._own("weights", data), mixed)

    def ffn(self, spec: FfnSpec, data: U8, x: Input, active: I32 | None = None) -> F32:
        """See `tpi.kernels.Kernels`."""
        return self._inner.ffn(spec, self._own("weights", data), self._taken(x), active)

    def route(self, router: RouterSpec, x: Input) -> Routing:
        """See `tpi.kernels.Kernels`."""
        return self._inner.route(router, self._taken(x))

    def experts(self, spec: ExpertsSpec, data: U8, x: Input, routing: Routing) -> F32:
        """See `tpi.kernels.Kernels`."""
        return self._inner.experts(spec, self._own("weights", data), self._taken(x), routing)

    def expert_pieces(self, spec: ExpertsSpec, data: Mapping[int, U8], x: Input, routing: Routing) -> F32:
        """See `tpi.kernels.Kernels`."""
        self._own("weights", *data.values())
        return self._inner.expert_pieces(spec, data, self._taken(x), routing)

    def add_residual(self, residual: Residual, x: F32, total: F32) -> F32:
        """See `tpi.kernels.Kernels`."""
        return self._inner.add_residual(residual, x, total)

    def open_chain(self, blocks: Sequence[ChainBlock]) -> Chain:
        """See `tpi.kernels.Kernels`."""
        for block in blocks:
            self._own("weights", block.data)
            self._own("the caches", *(cache for cache in (block.keys, block.values) if cache is not None))
        return self._inner.open_chain(blocks)

    def logits(self, run: RunLayout, data: U8, x: F32) -> F32:
        """See `tpi.kernels.Kernels`."""
        return self._inner.logits(run, self._own("weights", data), x)

    def gather(self, run: RunLayout, data: U8, rows: I32) -> F32:
        """See `tpi.kernels.Kernels`."""
        return self._inner.gather(run, self._own("weights", data), rows)

    def dequantise(self, run: RunLayout, data: U8, part: str) -> F32:
        """See `tpi.kernels.Kernels`."""
        return self._inner.dequantise(run, self._own("weights", data), part)

    def _own(self, what: str, *arrays: Any) -> Any:
        for array in arrays:
            self._memory.check(what, array)
        return arrays[0] if arrays else None

    def _made(self, x: object) -> Prepared | None:
        """What the kernels underneath know it by, if these prepared it."""
        return x.inner if isinstance(x, OwnedPrepared) and x.memory is self._memory else None

    def _taken(self, x: Input) -> Input:
        if isinstance(x, np.ndarray):
            return x
        if made := self._made(x):
            return made
        raise KernelError("what other kernels prepared is for their weights; prepare it again with these")
