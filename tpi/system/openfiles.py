"""The limit of open files, and advice for errors of reading or writing a file."""

import errno
import resource

from tpi.errors import UsageError

_TOO_MANY = (errno.EMFILE, errno.ENFILE)


def require_open_files(needed: int, what: str, otherwise: str = "") -> None:
    """Raise the soft limit of open files to `needed` if it is lower and the hard limit allows that.

    Args:
        needed: number of files that are open at once.
        what: the thing that needs them; the error begins with it.
        otherwise: an alternative, appended to the error.

    Raises:
        UsageError: if the hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UsageError(
            f"{what} needs {needed} open files at once, and this process may have {hard}; raise that (ulimit -n "
            f"{needed}){otherwise}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def way_to_write(error: OSError, otherwise: str) -> str:
    """Return advice for the user after `error`, which prevented a write: raise a limit, or else `otherwise`."""
    return "raise the limit of open files (ulimit -n)" if error.errno in _TOO_MANY else otherwise


def way_to_read(error: OSError, otherwise: str) -> str:
    """Return advice for the user after `error`, which prevented a read; `otherwise` if the file may be damaged."""
    if error.errno in (errno.EACCES, errno.EPERM):
        return "give this user permission to read it"
    if error.errno == errno.ENOMEM:
        return "free memory"
    return way_to_write(error, otherwise)
