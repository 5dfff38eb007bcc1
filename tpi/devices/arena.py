"""The memory of one device, up to a hard limit that is never exceeded."""

from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from tpi.devices.pages import Bytes, page_buffer, round_up
from tpi.errors import DeviceError, DeviceFullError

Array = npt.NDArray[Any]


class NamedMemory(np.ndarray[Any, np.dtype[Any]]):
    """Memory that the host cannot reach, and every slice, view and shape of it: an array that says where, never what.

    Printing it reads nothing, as a test does that fails.
    """

    def __repr__(self) -> str:
        """Where it is."""
        return f"<{self.dtype} {list(self.shape)} of a device, named by {self.ctypes.data:#x}>"

    __str__ = __repr__


def named(memory: Bytes) -> Bytes:
    """`memory` as the name of what lies elsewhere."""
    return memory.view(NamedMemory)


def drop(memory: Bytes) -> None:
    """Memory that goes when nothing refers to it any more."""


def alone(room: int) -> int:
    """The bytes of a limit that others than the arena take, where nobody does."""
    return 0


class Arena:
    """Whole pages that nobody else has. May be used by several threads.

    An array of an arena says where bytes are, and how many. Where the host cannot reach the device's memory, only the
    device's own kernels and copies may look at what is there; slices, views and shapes of the array work as anywhere.
    """

    def __init__(
        self,
        device: str,
        limit: int | None = None,
        allocate: Callable[[int], Bytes] = page_buffer,
        release: Callable[[Bytes], None] = drop,
        beside: Callable[[int], int] = alone,
        allocate_cut: Callable[[int, Sequence[int]], Bytes] | None = None,
    ) -> None:
        """`limit` is in bytes; None: whatever the system gives. `allocate` makes a zeroed buffer of so many bytes.

        `release` is called with each buffer that was freed. `beside` is told how many bytes of the limit are left to
        others, and says how many they take, when they have given back what they can. `allocate_cut` makes a buffer that
        may be cut at some offsets: for a device that gives no more than so much in one piece.
        """
        self.limit = limit
        self._device = device
        self._allocate = allocate
        self._release = release
        self._beside = beside
        self._allocate_cut = allocate_cut
        self._lock = Lock()
        self._used = 0
        self._held: dict[int, Bytes] = {}  # by address
        self._starts: list[int] = []  # in order

    @property
    def used(self) -> int:
        """Bytes that are allocated now, in whole pages."""
        return self._used

    def allocate(self, size: int, cuts: Sequence[int] = ()) -> Bytes:
        """`size` bytes, 1-D uint8, zeroed, from the start of a page on; the rest of the last page is nobody else's.

        `cuts` are offsets, in order, that no array which a kernel or a copy is given reaches across.

        Raises:
            DeviceFullError: if they do not fit beside what is allocated; names the smallest limit that would do.
        """
        if not size:
            return self._allocate(0)
        with self._lock:
            self._used += round_up(size)  # first: what lies beside it may ask meanwhile how much there is left
            try:
                memory = self._within_limit(round_up(size), cuts)
            except BaseException:
                self._used -= round_up(size)
                raise
            start = bounds(memory)[0]
            self._held[start] = memory
            insort(self._starts, start)
        return memory[:size]

    def _within_limit(self, size: int, cuts: Sequence[int]) -> Bytes:
        """`size` bytes that are counted already."""
        if self.limit is not None and (used := self._used + self._beside(self.limit - self._used)) > self.limit:
            raise DeviceFullError(self._device, self.limit, used)
        return self._allocate_cut(size, cuts) if cuts and self._allocate_cut else self._allocate(size)

    def free(self, memory: Bytes) -> None:
        """Give back what `allocate` returned; no view of it may be used any more.

        Raises:
            DeviceError: if it is anything else, or was freed before.
        """
        if not memory.size:
            return
        start = bounds(memory)[0]
        with self._lock:
            if start not in self._held:
                raise DeviceError(f"this is no memory that {self._device} allocated, or it was freed before")
            self._starts.remove(start)
            freed = self._held.pop(start)
            self._used -= freed.size
        self._release(freed)

    def owns(self, array: Array) -> bool:
        """Whether every byte of `array` lies in one allocation."""
        if not array.size:
            return True
        start, end = bounds(array)
        with self._lock:
            at = bisect_right(self._starts, start) - 1
            return at >= 0 and end <= bounds(self._held[self._starts[at]])[1]

    def check(self, what: str, array: Array) -> None:
        """Refuse memory that is not this device's.

        Raises:
            DeviceError: if any byte of `array` lies elsewhere; `what` names it.
        """
        if not self.owns(array):
            raise DeviceError(f"{what} must lie in the memory of {self._device}; allocate them there and copy them")


def cuts_between(slots: Iterable[tuple[int, int]]) -> list[int]:
    """Return the offsets, in order, at which no slot begins before and ends behind; a slot is its begin and its end."""
    found: list[int] = []
    end = 0
    for begin, stop in sorted(slots):
        if begin >= end and begin:
            found.append(begin)
        end = max(end, stop)
    return found


def bounds(array: Array) -> tuple[int, int]:
    """Addresses of the first byte of an array that is not empty, and of the byte after its last."""
    start = end = array.ctypes.data
    for length, stride in zip(array.shape, array.strides, strict=True):
        reach = (length - 1) * stride
        start, end = start + min(0, reach), end + max(0, reach)
    return start, end + array.itemsize
