"""A full disk, told from other errors of the operating system."""

import errno

from tpi.errors import WeightsError
from tpi.system.openfiles import way_to_write

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_full(error: OSError) -> bool:
    """Whether there is no room: on the disk, in the user's quota, or under the limit of a file's size."""
    return error.errno in _FULL


def write_error(name: object, error: OSError, way_out: str) -> WeightsError:
    """Return the error for what could not be written; `way_out` ends the sentence unless too many files are open."""
    full = "disk full: " if is_full(error) else ""
    return WeightsError(f"{full}cannot write {name}: {error.strerror or error}; {way_to_write(error, way_out)}")
