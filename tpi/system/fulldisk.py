"""Detection of a full disk among the errors of the operating system."""

import errno

from tpi.errors import WeightsError
from tpi.system.openfiles import way_to_write

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_full(error: OSError) -> bool:
    """Return True if the disk is full, the user's quota is used up, or the file exceeds a size limit."""
    return error.errno in _FULL


def write_error(name: object, error: OSError, way_out: str) -> WeightsError:
    """Return the error for a failed write of the file `name`.

    The message ends with the advice `way_out`, or with advice about open files if too many are open.
    """
    full = "disk full: " if is_full(error) else ""
    return WeightsError(f"{full}cannot write {name}: {error.strerror or error}; {way_to_write(error, way_out)}")
