"""Page-aligned byte buffers that exist once and are reused: what direct reads go into."""

import mmap

import numpy as np
import numpy.typing as npt

PAGE = 4096  # bytes: what direct reads must be aligned to, in memory and in the file
_HUGE = 2 << 20  # bytes of a huge page: one piece of a read instead of 512, which doubles what a fast disk delivers
Bytes = npt.NDArray[np.uint8]


def round_up(size: int) -> int:
    """The smallest multiple of `PAGE` that is at least `size`."""
    return -(-size // PAGE) * PAGE


def page_buffer(size: int) -> Bytes:
    """A zeroed, page-aligned `uint8` array of `round_up(size)` bytes, whose pages cost nothing until touched.

    Huge pages are asked for wherever a whole one fits: never more memory is taken than was asked for.
    """
    if not size:
        return np.empty(0, np.uint8)
    size = round_up(size)
    if size < _HUGE:
        return np.frombuffer(_anonymous(size), np.uint8)
    area = _anonymous(size + _HUGE)
    start = -np.frombuffer(area, np.uint8).ctypes.data % _HUGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE, start, size // _HUGE * _HUGE)
    return np.frombuffer(area, np.uint8, size, start)


def _anonymous(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
