"""Copies between the host and an OpenCL device, or within it, on queues of their own next to the compute queue."""

from contextlib import suppress
from typing import Any

import numpy as np

from tpi.devices.base import Event, Finished
from tpi.devices.failures import close_all
from tpi.devices.host import check_sizes
from tpi.devices.opencl.card import OpenClCard
from tpi.devices.opencl.discover import is_gpu, opencl
from tpi.devices.pages import PAGE, Bytes, page_buffer, round_up
from tpi.errors import DeviceError


class CopyEvent:
    """A pending copy as an OpenCL event (`tpi.devices.base.Pending`)."""

    __slots__ = ("_card", "_event")

    def __init__(self, card: OpenClCard, event: Any) -> None:
        self._card = card
        self._event = event

    @property
    def done(self) -> bool:
        """True if `wait` would return at once; a copy that failed has ended."""
        try:
            return int(self._event.command_execution_status) <= 0
        except Exception:  # noqa: BLE001 - the device failed; `wait` raises
            return True

    def wait(self) -> None:
        """Wait for the end of the copy; raise DeviceError if it failed."""
        with self._card.explained():
            self._event.wait()


class Copies:
    """Copies on one queue for each direction, so that weights go up while KV pages are downloaded. Several threads
    may use it at once.
    """

    def __init__(self, card: OpenClCard) -> None:
        cl = opencl()
        self._card = card
        with card.explained():
            self._coming = cl.CommandQueue(card.context)
            self._going = cl.CommandQueue(card.context)

    def start(self, source: Bytes, target: Bytes, from_here: bool, to_here: bool) -> Event:
        """Start a copy of contiguous bytes; `from_here` and `to_here` are True if that end is on the device.

        Raises:
            DeviceError: if the arrays differ in size, are not contiguous, or neither is on the device.
        """
        check_sizes(source, target)
        if not (from_here or to_here):
            raise DeviceError(f"one end of a copy must lie in the memory of {self._card.name}")
        if not (source.flags.c_contiguous and target.flags.c_contiguous):
            raise DeviceError(f"a copy to or from {self._card.name} needs contiguous bytes")
        if not (to_here or target.flags.writeable):
            raise DeviceError(f"a copy from {self._card.name} needs writable memory")
        if not source.size:
            return Finished(lambda: None)
        try:
            with self._card.explained():
                return CopyEvent(self._card, self._enqueue(source, target, from_here, to_here))
        except DeviceError as error:
            return Finished(_raising(error))

    def close(self) -> None:
        """Wait until every started copy has ended. Further calls do nothing."""
        close_all(self._coming.finish, self._going.finish)

    def _enqueue(self, source: Bytes, target: Bytes, from_here: bool, to_here: bool) -> Any:
        cl, locate = opencl(), self._card.addresses.locate
        queue = self._coming if to_here else self._going
        if from_here and to_here:
            (old, old_at), (new, new_at) = locate(source), locate(target)
            event = cl.enqueue_copy(queue, new, old, byte_count=source.size, src_offset=old_at, dst_offset=new_at)
        elif to_here:
            buffer, at = locate(target)
            event = cl.enqueue_copy(queue, buffer, source, dst_offset=at, is_blocking=False)
        else:
            buffer, at = locate(source)
            event = cl.enqueue_copy(queue, target, buffer, src_offset=at, is_blocking=False)
        queue.flush()
        return event

    def staging(self, size: int) -> Bytes:
        """Return `size` zeroed bytes of host memory.

        They are pinned if the card has its own memory and the driver allows.
        """
        device = self._card.device
        if size and is_gpu(device) and not device.host_unified_memory:
            with suppress(DeviceError), self._card.explained():
                return pinned(self._card.context, self._coming, size)
        return page_buffer(size)


def pinned(context: Any, queue: Any, size: int) -> Bytes:
    """Return `round_up(size)` zeroed, page-aligned bytes of host memory that the driver has pinned."""
    cl = opencl()
    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.ALLOC_HOST_PTR
    buffer = cl.Buffer(context, flags, round_up(size) + PAGE)
    access = cl.map_flags.READ | cl.map_flags.WRITE
    area, _ = cl.enqueue_map_buffer(
        queue, buffer, access, 0, (buffer.size,), np.uint8
    )  # unmapped when its last view is gone
    start = -area.ctypes.data % PAGE
    found: Bytes = area[start : start + round_up(size)]
    found.fill(0)
    return found


def _raising(error: Exception) -> Any:
    def fail() -> None:
        raise error

    return fail
