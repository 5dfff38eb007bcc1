"""Page-aligned byte buffers that exist once and are reused: what direct reads go into."""

import mmap

import numpy as np
import numpy.typing as npt

PAGE = 4096  # bytes: what direct reads must be aligned to, in memory and in the file
Bytes = npt.NDArray[np.uint8]


def round_up(size: int) -> int:
    """The smallest multiple of `PAGE` that is at least `size`."""
    return -(-size // PAGE) * PAGE


def page_buffer(size: int) -> Bytes:
    """A zeroed, page-aligned `uint8` array of `round_up(size)` bytes, whose pages cost nothing until touched."""
    if not size:
        return np.empty(0, np.uint8)
    return np.frombuffer(mmap.mmap(-1, round_up(size)), np.uint8)
