"""Errors below a device as one sentence: drivers, compilers and libraries raise exceptions of every kind."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from tpi.errors import DeviceError, TpiError
from tpi.text import plain

_CHARACTERS = 300
_TELLING = (RuntimeError, OSError, ImportError)  # types whose text is clear without their name


@contextmanager
def explained(what: str, remedy: str) -> Iterator[None]:
    """Raise an exception from within the block as a DeviceError of one sentence; a TpiError passes unchanged.

    `what` says what failed ("cuda:0 failed") and `remedy` what to do.
    """
    try:
        yield
    except TpiError:
        raise
    except Exception as error:
        raise DeviceError(f"{what}: {reason(error)}; {remedy}") from error


def reason(error: BaseException) -> str:
    """Return the reason in `error` as one line of at most 300 characters.

    The line is the first that is not empty: errors of CUDA and of compilers can go on for pages.
    """
    text = str(getattr(error, "error_message", None) or error)
    line = next((each.strip() for each in text.splitlines() if each.strip()), "")
    if not line or (type(error).__module__ == "builtins" and not isinstance(error, _TELLING)):
        line = f"{type(error).__name__}: {line}"
    return plain(line.rstrip(": ."), _CHARACTERS)


def close_all(*steps: Callable[[], object]) -> None:
    """Call each of `steps`, which close a device, and ignore the errors of each.

    A device that failed raised its error when a result was awaited; errors while closing add nothing.
    """
    for step in steps:
        with suppress(Exception):
            step()
