"""Arrays that name memory of an OpenCL device: addresses of the host that nobody can read stand for its buffers.

All code that moves weights and pages slices, views and reshapes numpy arrays. So an allocation reserves as many
addresses of the host as it has bytes on the device, without any memory behind them, and the array over them is its
name: what an address is worth, `Addresses.locate` tells. Looking at what such an array holds ends the process, so that
no mistake is taken for zeros.
"""

import mmap
from bisect import bisect_right, insort
from collections.abc import Callable
from threading import Lock
from typing import Any

import numpy as np

from tpi.devices.arena import Array, bounds, named
from tpi.devices.pages import Bytes, round_up
from tpi.errors import DeviceError

_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
_NO_ACCESS = 0  # PROT_NONE, which the module mmap does not name


def reserve(size: int) -> Bytes:
    """Addresses for `size` bytes, in whole pages, as a 1-D uint8 array that must not be looked at."""
    return named(np.frombuffer(mmap.mmap(-1, round_up(size), flags=_FLAGS, prot=_NO_ACCESS), np.uint8))


class Addresses:
    """The buffers of one device by the addresses that stand for them. May be used by several threads."""

    def __init__(self, device: str, create: Callable[[int], Any]) -> None:
        """`create` makes a zeroed `pyopencl.Buffer` of so many bytes, or raises."""
        self._device = device
        self._create = create
        self._lock = Lock()
        self._buffers: dict[int, Any] = {}  # by first address
        self._starts: list[int] = []  # in order

    def allocate(self, size: int) -> Bytes:
        """A new buffer's name; for `Arena`."""
        if not size:
            return np.empty(0, np.uint8)
        buffer, memory = self._create(size), reserve(size)
        start = bounds(memory)[0]
        with self._lock:
            self._buffers[start] = buffer
            insort(self._starts, start)
        return memory

    def release(self, memory: Bytes) -> None:
        """Give a buffer back; its addresses stay taken for as long as an array refers to them."""
        start = bounds(memory)[0]
        with self._lock:
            self._starts.remove(start)
            buffer = self._buffers.pop(start)
        buffer.release()

    def locate(self, array: Array) -> tuple[Any, int]:
        """The buffer that holds an array's bytes, which are not none, and the offset of the first in it.

        Raises:
            DeviceError: if the array names nothing here.
        """
        start, end = bounds(array)
        with self._lock:
            at = bisect_right(self._starts, start) - 1
            first = self._starts[at] if at >= 0 else end
            buffer = self._buffers.get(first)
        if buffer is None or end - first > buffer.size:
            raise DeviceError(f"an array names no memory of {self._device}, or memory that was freed")
        return buffer, start - first

    def close(self) -> None:
        """Give back every buffer that is left. Idempotent."""
        with self._lock:
            buffers = list(self._buffers.values())
            self._buffers.clear()
            self._starts.clear()
        for buffer in buffers:
            buffer.release()
