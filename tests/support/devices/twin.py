"""A second device for tests: it uses the host's cores, with an arena and threads of its own.

Like a GPU's, its kernels refuse weights, keys and values in other memory, and inputs that other kernels prepared.
"""

from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import TypeVar

import numpy as np

from tpi.devices.arena import Arena
from tpi.devices.base import Event, Pending
from tpi.devices.callqueue import CallQueue
from tpi.devices.host import check_sizes
from tpi.devices.memorychecked import MemoryCheckedKernels
from tpi.devices.pages import Bytes, page_buffer
from tpi.errors import DeviceError
from tpi.kernels import Kernels
from tpi.kernels.kv import KvPages
from tpi.kernels.spec import U8, KvArray

T = TypeVar("T")


class Twin:
    """A `tpi.devices.base.Device`; a context manager that ends its threads."""

    name = "twin"

    def __init__(self, kernels: Kernels, limit: int | None = None) -> None:
        self.memory = Arena(self.name, limit)
        self.kernels: Kernels = MemoryCheckedKernels(kernels, self.memory)
        self._computing = CallQueue("twin-compute")
        self._copying = CallQueue("twin-copy")

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
        """Return a copy of weights in the device's memory."""
        held = self.memory.allocate(data.size)
        self.copy(data, held).wait()
        return held

    def pages(self, like: KvPages) -> KvPages:
        """Return a copy of pages in the device's memory."""
        keys, values = (
            {layer: self._array(each) for layer, each in arrays.items()} for arrays in (like.keys, like.values)
        )
        return replace(like, keys=keys, values=values)

    def _array(self, like: KvArray) -> KvArray:
        held = self.hold(like.reshape(-1).view(np.uint8))
        return held.view(like.dtype).reshape(like.shape)
