"""A second device for tests: the host's cores once more, with an arena of its own and threads that run beside the host.

Its kernels refuse weights, keys and values that lie elsewhere, and what other kernels prepared, as a GPU's would.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from tpi.devices.arena import Arena
from tpi.devices.base import Event, Pending
from tpi.devices.host import check_sizes
from tpi.devices.inorder import InOrder
from tpi.devices.pages import Bytes, page_buffer
from tpi.errors import DeviceError, KernelError
from tpi.kernels import Chain, Kernels
from tpi.kernels.spec import (
    F32,
    I32,
    U8,
    AttentionSpec,
    Batch,
    BlockSpec,
    ChainBlock,
    FfnSpec,
    Input,
    KvArray,
    NormSpec,
    Prepared,
    Projected,
    Residual,
)
from tpi.kv import KvPages
from tpi.pack.layout import RunLayout

T = TypeVar("T")


class Twin:
    """A `tpi.devices.base.Device`; a context manager that ends its threads."""

    name = "twin"

    def __init__(self, kernels: Kernels, limit: int | None = None) -> None:
        self.memory = Arena(self.name, limit)
        self.kernels: Kernels = TwinKernels(kernels, self.memory)
        self._computing = InOrder("twin-compute")
        self._copying = InOrder("twin-copy")

    def __enter__(self) -> "Twin":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._computing.close()
        self._copying.close()

    def staging(self, size: int) -> Bytes:
        return page_buffer(size)

    def copy(self, source: Bytes, target: Bytes) -> Event:
        check_sizes(source, target)
        if not (self.memory.owns(source) or self.memory.owns(target)):
            raise DeviceError(f"one end of a copy must lie in the memory of {self.name}")
        return self._copying.start(lambda: np.copyto(target, source))

    def start(self, call: Callable[[], T]) -> Pending[T]:
        return self._computing.start(call)

    def hold(self, data: U8) -> U8:
        """A copy of some weights in its memory."""
        held = self.memory.allocate(data.size)
        self.copy(data, held).wait()
        return held

    def pages(self, like: KvPages) -> KvPages:
        """A copy of some pages in its memory."""
        keys, values = ([self._array(each) for each in arrays] for arrays in (like.keys, like.values))
        return replace(like, keys=keys, values=values)

    def _array(self, like: KvArray) -> KvArray:
        held = self.hold(like.reshape(-1).view(np.uint8))
        return held.view(like.dtype).reshape(like.shape)


@dataclass(frozen=True)
class TwinPrepared:
    """What only the twin's kernels take."""

    inner: Prepared

    @property
    def shape(self) -> tuple[int, int]:
        return self.inner.shape

    def values(self) -> F32:
        return self.inner.values()


class TwinKernels:
    """Kernels that look where their arrays are. See `tpi.kernels.Kernels`."""

    def __init__(self, kernels: Kernels, memory: Arena) -> None:
        self._inner = kernels
        self._memory = memory

    def isa(self) -> str:
        return self._inner.isa()

    def set_threads(self, count: int) -> None:
        self._inner.set_threads(count)

    def threads(self) -> int:
        return self._inner.threads()

    def read(self, data: U8) -> None:
        self._inner.read(self._own("the data", data))

    def norm(self, norm: NormSpec, x: F32) -> F32:
        return self._inner.norm(norm, x)

    def prepare(self, spec: BlockSpec, x: Input, into: Prepared | None = None) -> TwinPrepared:
        return TwinPrepared(self._inner.prepare(spec, x, into.inner if isinstance(into, TwinPrepared) else None))

    def attention(self, spec: AttentionSpec, data: U8, x: Input, keys: KvArray, values: KvArray, batch: Batch) -> F32:
        self._own("the caches", keys, values)
        return self._inner.attention(spec, self._own("weights", data), _taken(x), keys, values, batch)

    def project(self, spec: AttentionSpec, data: U8, x: Input, positions: I32) -> Projected:
        return self._inner.project(spec, self._own("weights", data), _taken(x), positions)

    def attend(self, spec: AttentionSpec, projected: Projected, keys: KvArray, values: KvArray, batch: Batch) -> F32:
        self._own("the caches", keys, values)
        return self._inner.attend(spec, projected, keys, values, batch)

    def output(self, spec: AttentionSpec, data: U8, mixed: F32) -> F32:
        return self._inner.output(spec, self._own("weights", data), mixed)

    def ffn(self, spec: FfnSpec, data: U8, x: Input, active: I32 | None = None) -> F32:
        return self._inner.ffn(spec, self._own("weights", data), _taken(x), active)

    def add_residual(self, residual: Residual, x: F32, total: F32) -> F32:
        return self._inner.add_residual(residual, x, total)

    def open_chain(self, blocks: Sequence[ChainBlock]) -> Chain:
        for block in blocks:
            self._own("weights", block.data)
        return self._inner.open_chain(blocks)

    def logits(self, run: RunLayout, data: U8, x: F32) -> F32:
        return self._inner.logits(run, self._own("weights", data), x)

    def gather(self, run: RunLayout, data: U8, rows: I32) -> F32:
        return self._inner.gather(run, self._own("weights", data), rows)

    def dequantise(self, run: RunLayout, data: U8, part: str) -> F32:
        return self._inner.dequantise(run, self._own("weights", data), part)

    def _own(self, what: str, *arrays: Any) -> Any:
        for array in arrays:
            self._memory.check(what, array)
        return arrays[0]


def _taken(x: Input) -> Input:
    if isinstance(x, np.ndarray):
        return x
    if isinstance(x, TwinPrepared):
        return x.inner
    raise KernelError("what other kernels prepared is for their weights; prepare it again with these")
