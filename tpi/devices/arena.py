"""The memory of one device, with a hard limit that is never exceeded."""

from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from tpi.devices.pages import Bytes, page_buffer, round_up
from tpi.errors import DeviceError, DeviceFullError

Array = npt.NDArray[Any]


class AddressOnlyArray(np.ndarray[Any, np.dtype[Any]]):
    """An array that stands for device memory which the host cannot read; only its address, shape and strides are valid.

    Slices, views and reshapes of the array are of this class too. Its `repr` reads no memory, so that tests can print
    the array.
    """

    def __repr__(self) -> str:
        """Return a text with the dtype, shape and address of the array. Its values cannot be read."""
        return f"<{self.dtype} {list(self.shape)} of a device, named by {self.ctypes.data:#x}>"

    __str__ = __repr__


def as_address_only(memory: Bytes) -> Bytes:
    """Return `memory` as an array that gives addresses only, for memory that the host cannot read."""
    return memory.view(AddressOnlyArray)


def drop(memory: Bytes) -> None:
    """Do nothing: the memory is released when no array refers to it any more."""


def no_other_use(room: int) -> int:
    """Return 0: no other user takes memory under the arena's limit."""
    return 0


class Arena:
    """Device memory, allocated in whole pages up to a limit. Several threads may use it at once.

    An array of an arena gives an address and a number of bytes. If the host cannot read the device's memory, only the
    device's own kernels and copies may access the bytes. Slices, views and reshapes of the array work as usual.
    """

    def __init__(
        self,
        device: str,
        limit: int | None = None,
        allocate: Callable[[int], Bytes] = page_buffer,
        release: Callable[[Bytes], None] = drop,
        other_use: Callable[[int], int] = no_other_use,
        allocate_cut: Callable[[int, Sequence[int]], Bytes] | None = None,
    ) -> None:
        """Create an arena of at most `limit` bytes; None: as much as the system gives.

        `allocate` returns a zeroed buffer of the given size in bytes. `release` is called with each buffer that was
        freed. `other_use` is called with the number of bytes that the limit leaves to other users of the memory. It
        frees what they hold beyond that, as far as possible, and returns the bytes that they still take.
        `allocate_cut` returns a buffer that may be cut at the given offsets, for a device that limits the size of one
        buffer.
        """
        self.limit = limit
        self._device = device
        self._allocate = allocate
        self._release = release
        self._other_use = other_use
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
        """Return `size` zeroed bytes, 1-D uint8, aligned to a page; the rest of the last page stays unused.

        `cuts` are offsets in ascending order. No array that is passed to a kernel or a copy may span one of them.

        Raises:
            DeviceFullError: if the bytes do not fit in addition to the memory already allocated; the error names the
                limit needed.
        """
        if not size:
            return self._allocate(0)
        with self._lock:
            self._used += round_up(size)  # counted before `other_use` is called, which may read `used`
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
        """Allocate `size` bytes, which `used` already includes.

        Raise DeviceFullError if the memory has no room for them.
        """
        if self.limit is not None and (used := self._used + self._other_use(self.limit - self._used)) > self.limit:
            raise DeviceFullError(self._device, self.limit, used)
        return self._allocate_cut(size, cuts) if cuts and self._allocate_cut else self._allocate(size)

    def free(self, memory: Bytes) -> None:
        """Free an array that `allocate` returned; no view of it may be used any more.

        Raises:
            DeviceError: if it is any other array, or was freed before.
        """
        if not memory.size:
            return
        start = bounds(memory)[0]
        with self._lock:
            if start not in self._held:
                raise DeviceError(f"this memory was not allocated by {self._device}, or was freed before")
            self._starts.remove(start)
            freed = self._held.pop(start)
            self._used -= freed.size
        self._release(freed)

    def owns(self, array: Array) -> bool:
        """Return True if every byte of `array` lies in one allocation of this arena."""
        if not array.size:
            return True
        start, end = bounds(array)
        with self._lock:
            at = bisect_right(self._starts, start) - 1
            return at >= 0 and end <= bounds(self._held[self._starts[at]])[1]

    def check(self, what: str, array: Array) -> None:
        """Check that `array` lies in this device's memory.

        Raises:
            DeviceError: if any byte of it lies elsewhere; `what` names the array.
        """
        if not self.owns(array):
            raise DeviceError(
                f"{what} must lie in the memory of {self._device}; allocate memory there and copy the array to it"
            )


def cuts_between(slots: Iterable[tuple[int, int]]) -> list[int]:
    """Return the begins of slots, but 0, at which a buffer may be cut: no other slot spans them. In ascending order.

    A slot is a pair of offsets: its first byte, and the byte after its last.
    """
    found: list[int] = []
    end = 0
    for begin, stop in sorted(slots):
        if begin >= end and begin:
            found.append(begin)
        end = max(end, stop)
    return found


def bounds(array: Array) -> tuple[int, int]:
    """Return the addresses of an array's first byte and of the byte after its last; the array must not be empty."""
    start = end = array.ctypes.data
    for length, stride in zip(array.shape, array.strides, strict=True):
        reach = (length - 1) * stride
        start, end = start + min(0, reach), end + max(0, reach)
    return start, end + array.itemsize
