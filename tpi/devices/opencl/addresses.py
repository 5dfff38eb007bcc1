"""Numpy arrays that stand for memory of an OpenCL device, over host addresses that cannot be read.

All code that moves weights and pages slices, views and reshapes numpy arrays. An allocation therefore reserves as many
host addresses as it has bytes on the device, without memory behind them. The array over these addresses stands for the
device's bytes, and `Addresses.locate` maps it to a buffer. Reading such an array crashes the process, so that a
mistake cannot pass for zeros.
"""

import mmap
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from threading import Lock
from typing import Any

import numpy as np

from tpi.devices.arena import Array, as_address_only, bounds
from tpi.devices.pages import Bytes, round_up
from tpi.errors import DeviceError

_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
_NO_ACCESS = 0  # PROT_NONE, for which the module mmap has no name


def reserve(size: int) -> Bytes:
    """Reserve addresses for `size` bytes, in whole pages; return a 1-D uint8 array that must not be read."""
    return as_address_only(np.frombuffer(mmap.mmap(-1, round_up(size), flags=_FLAGS, prot=_NO_ACCESS), np.uint8))


class Addresses:
    """The buffers of one device, by the addresses that stand for them. Several threads may use it at once."""

    def __init__(self, device: str, create: Callable[[int], Any], most: Callable[[], int] = lambda: 1 << 62) -> None:
        """Create the table; `create` returns a zeroed `pyopencl.Buffer` of the given bytes, or raises.

        `most` returns the most bytes that one buffer may have.
        """
        self._device = device
        self._create = create
        self._most = most
        self._lock = Lock()
        self._buffers: dict[int, Any] = {}  # by first address
        self._starts: list[int] = []  # ascending

    def allocate(self, size: int) -> Bytes:
        """Allocate `size` bytes in one buffer; return the array that stands for it."""
        return self.allocate_cut(size, ())

    def allocate_cut(self, size: int, cuts: Sequence[int]) -> Bytes:
        """Allocate `size` bytes; return the array that stands for them.

        If one buffer may not be so large, several are created, which meet at some of the offsets `cuts`.
        """
        if not size:
            return np.empty(0, np.uint8)
        with ExitStack() as stack:
            made: list[tuple[int, Any]] = []
            for begin, end in _parts(size, cuts, self._most() if cuts else size):
                made.append((begin, self._create(end - begin)))
                stack.callback(made[-1][1].release)
            memory = reserve(size)
            stack.pop_all()
        start = bounds(memory)[0]
        with self._lock:
            for begin, buffer in made:
                self._buffers[start + begin] = buffer
                insort(self._starts, start + begin)
        return memory

    def release(self, memory: Bytes) -> None:
        """Release the buffers of `memory`; their addresses stay reserved until no array refers to them."""
        start, end = bounds(memory)
        with self._lock:
            mine = self._starts[bisect_left(self._starts, start) : bisect_left(self._starts, end)]
            buffers = [self._buffers.pop(each) for each in mine]
            self._starts = [each for each in self._starts if each not in set(mine)]
        for buffer in buffers:
            buffer.release()

    def locate(self, array: Array) -> tuple[Any, int]:
        """Return the buffer that holds an array's bytes, and the offset of the first byte in it.

        The array must not be empty.

        Raises:
            DeviceError: if no buffer holds all of its bytes.
        """
        start, end = bounds(array)
        with self._lock:
            at = bisect_right(self._starts, start) - 1
            first = self._starts[at] if at >= 0 else end
            buffer = self._buffers.get(first)
        if buffer is None or end - first > buffer.size:
            raise DeviceError(f"an array is not in the memory of {self._device}, or was freed")
        return buffer, start - first

    def close(self) -> None:
        """Release every buffer that is left. Further calls do nothing."""
        with self._lock:
            buffers = list(self._buffers.values())
            self._buffers.clear()
            self._starts.clear()
        for buffer in buffers:
            buffer.release()


def _parts(size: int, cuts: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Divide `size` bytes at some of the offsets `cuts` into as few parts as possible; yield begin and end of each.

    A part is larger than `most` bytes only if no cut lies inside it.
    """
    begin = last = 0
    for cut in (*cuts, size):
        if cut - begin > most and last > begin:
            yield begin, last
            begin = last
        last = cut
    yield begin, size
