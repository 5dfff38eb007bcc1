"""The OpenCL device: an arena of buffers, queues to copy on, and a thread that calls its kernels in order."""

from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

from tpi.devices.base import Event, Pending
from tpi.devices.callqueue import CallQueue
from tpi.devices.failures import close_all
from tpi.devices.opencl.card import OpenClCard
from tpi.devices.opencl.compute.kernels import OpenClKernels
from tpi.devices.opencl.copies import Copies
from tpi.devices.opencl.discover import choose_device, identity
from tpi.devices.pages import PAGE, Bytes
from tpi.errors import UsageError
from tpi.kernels import Kernels

T = TypeVar("T")
_MARGIN = 8  # one part in so many of the memory is left to programs and the screen


class OpenClDevice:
    """A graphics chip as a device of a node (`tpi.devices.base.Device`), through OpenCL."""

    def __init__(self, name: str, device: Any, limit: int) -> None:
        """Open `device`, a `pyopencl.Device`; `limit` bytes are for its arena and its kernels' buffers together."""
        self.name = name
        self._card = OpenClCard(name, device, limit)
        self.memory = self._card.memory
        self.kernels: Kernels = OpenClKernels(self._card, self.memory)
        self._copies = Copies(self._card)
        self._computing = CallQueue(f"{name} compute")

    @cached_property
    def identity(self) -> str:
        """Model, UUID or bus address, and driver version: everything that the device's speed depends on."""
        with self._card.explained():
            return identity(self._card.device)

    @cached_property
    def shares_memory(self) -> bool:
        """True if the device's memory is the host's."""
        with self._card.explained():
            return bool(self._card.device.host_unified_memory)

    @property
    def used(self) -> int:
        """Bytes of the device's memory in use, by its arena and by the kernels' buffers."""
        return self.memory.used + self._card.working_bytes

    def copy(self, source: Bytes, target: Bytes) -> Event:
        """Start copying bytes between host and device memory, or within the device's; return an event for the end."""
        return self._copies.start(source, target, self.memory.owns(source), self.memory.owns(target))

    def start(self, call: Callable[[], T]) -> Pending[T]:
        """Queue a call of this device's kernels behind the calls started before it. Return a pending operation."""
        return self._computing.start(call)

    def staging(self, size: int) -> Bytes:
        """Return `size` zeroed bytes of host memory that this device copies from and to at full speed."""
        return self._copies.staging(size)

    def close(self) -> None:
        """Wait until all started calls and copies have ended, then end the device's threads."""
        close_all(self._computing.close, self._copies.close, self._card.close)


def open_opencl(argument: str, limit: int | None) -> OpenClDevice:
    """Return the OpenCL device with index `argument`, with `limit` bytes of its memory (None: most of it).

    If `argument` is empty: the first GPU, or the first device if there is no GPU.

    Raises:
        UsageError: if there is no such device, or it has less memory than `limit`.
    """
    index, device = choose_device(argument)
    name, size = f"opencl:{index} ({device.name.strip()})", int(device.global_mem_size)
    if limit is not None and limit > size:
        raise UsageError(f"{name} has {size} bytes of memory, not {limit}: give a smaller --gpu-memory")
    return OpenClDevice(name, device, (size - size // _MARGIN) // PAGE * PAGE if limit is None else limit)
