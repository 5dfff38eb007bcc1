"""The OpenCL device: an arena of buffers, queues to copy on, and a thread that calls its kernels in order."""

from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

from tpi.devices.base import Event, Pending
from tpi.devices.failures import close_all
from tpi.devices.inorder import InOrder
from tpi.devices.opencl.card import OpenClCard
from tpi.devices.opencl.compute.kernels import OpenClKernels
from tpi.devices.opencl.copies import Copies
from tpi.devices.opencl.discover import choose_device, identity
from tpi.devices.pages import PAGE, Bytes
from tpi.errors import UsageError
from tpi.kernels import Kernels

T = TypeVar("T")
_MARGIN = 8  # a part in so many of the memory is left to programs and the screen


class OpenClDevice:
    """See `tpi.devices.base.Device`."""

    def __init__(self, name: str, device: Any, limit: int) -> None:
        """`device` is a `pyopencl.Device`; `limit` in bytes is of its arena and of what kernels have beside it."""
        self.name = name
        self._card = OpenClCard(name, device, limit)
        self.memory = self._card.memory
        self.kernels: Kernels = OpenClKernels(self._card, self.memory)
        self._copies = Copies(self._card)
        self._computing = InOrder(f"{name} compute")

    @cached_property
    def identity(self) -> str:
        """See `tpi.devices.base.Identified`."""
        with self._card.explained():
            return identity(self._card.device)

    @cached_property
    def shares_memory(self) -> bool:
        """See `tpi.devices.base.Sharing`."""
        with self._card.explained():
            return bool(self._card.device.host_unified_memory)

    @property
    def used(self) -> int:
        """Bytes of its memory that are taken: the arena's, and what kernels have beside it."""
        return self.memory.used + self._card.working_bytes

    def copy(self, source: Bytes, target: Bytes) -> Event:
        """See `Device.copy`."""
        return self._copies.start(source, target, self.memory.owns(source), self.memory.owns(target))

    def start(self, call: Callable[[], T]) -> Pending[T]:
        """See `Device.start`."""
        return self._computing.start(call)

    def staging(self, size: int) -> Bytes:
        """See `Device.staging`."""
        return self._copies.staging(size)

    def close(self) -> None:
        """See `Device.close`."""
        close_all(self._computing.close, self._copies.close, self._card.close)


def open_opencl(argument: str, limit: int | None) -> OpenClDevice:
    """The OpenCL device with index `argument` (empty: the first GPU, or else the first) and `limit` bytes of its
    memory.

    Raises:
        UsageError: if there is no such device, or it has less memory than `limit`.
    """
    index, device = choose_device(argument)
    name, size = f"opencl:{index} ({device.name.strip()})", int(device.global_mem_size)
    if limit is not None and limit > size:
        raise UsageError(f"{name} has {size} bytes of memory, not {limit}: limit it to {size} at most")
    return OpenClDevice(name, device, (size - size // _MARGIN) // PAGE * PAGE if limit is None else limit)
