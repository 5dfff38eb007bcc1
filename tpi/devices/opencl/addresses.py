"""Arrays that name memory of an OpenCL device: addresses of the host that nobody can read stand for its buffers.

All code that moves weights and pages slices, views and reshapes numpy arrays. So an allocation reserves as many
addresses of the host as it has bytes on the device, without any memory behind them, and the array over them is its
name: what an address is worth, `Addresses.locate` tells. Looking at what such an array holds ends the process, so that
no mistake is taken for zeros.
"""

import mmap
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
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

    def __init__(self, device: str, create: Callable[[int], Any], most: Callable[[], int] = lambda: 1 << 62) -> None:
        """`create` makes a zeroed `pyopencl.Buffer` of so many bytes, or raises; `most`: of one buffer."""
        self._device = device
        self._create = create
        self._most = most
        self._lock = Lock()
        self._buffers: dict[int, Any] = {}  # by first address
        self._starts: list[int] = []  # in order

    def allocate(self, size: int) -> Bytes:
        """A new buffer's name; for `Arena`."""
        return self.allocate_cut(size, ())

    def allocate_cut(self, size: int, cuts: Sequence[int]) -> Bytes:
        """The name of new memory; where one buffer may not be so large, of several that end at some of `cuts`."""
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
        """Give buffers back; their addresses stay taken for as long as an array refers to them."""
        start, end = bounds(memory)
        with self._lock:
            mine = self._starts[bisect_left(self._starts, start) : bisect_left(self._starts, end)]
            buffers = [self._buffers.pop(each) for each in mine]
            self._starts = [each for each in self._starts if each not in set(mine)]
        for buffer in buffers:
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


def _parts(size: int, cuts: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Begins and ends of as few parts as there can be, of `most` bytes each as far as `cuts` allow."""
    begin = last = 0
    for cut in (*cuts, size):
        if cut - begin > most and last > begin:
            yield begin, last
            begin = last
        last = cut
    yield begin, size
