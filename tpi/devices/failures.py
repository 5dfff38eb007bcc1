"""What fails below a device, as one sentence: drivers, compilers and libraries raise errors of every kind."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from tpi.errors import DeviceError, TpiError
from tpi.text import plain

_CHARACTERS = 300
_TELLING = (RuntimeError, OSError, ImportError)  # whose text says enough without their name


@contextmanager
def explained(what: str, remedy: str) -> Iterator[None]:
    """Raise whatever fails within as a DeviceError of one sentence; a TpiError passes as it is.

    `what` says what failed ("cuda:0 failed") and `remedy` what to do.
    """
    try:
        yield
    except TpiError:
        raise
    except Exception as error:
        raise DeviceError(f"{what}: {reason(error)}; {remedy}") from error


def reason(error: BaseException) -> str:
    """Return why something failed, in one line of at most 300 characters.

    It is the first line that says something: CUDA's errors and compilers' go on for pages.
    """
    text = str(getattr(error, "error_message", None) or error)
    line = next((each.strip() for each in text.splitlines() if each.strip()), "")
    if not line or (type(error).__module__ == "builtins" and not isinstance(error, _TELLING)):
        line = f"{type(error).__name__}: {line}"
    return plain(line.rstrip(": ."), _CHARACTERS)


def close_all(*steps: Callable[[], object]) -> None:
    """Take every step of closing a device, whether or not those before it failed.

    A device that has failed says so where a result is awaited; its end adds nothing to that.
    """
    for step in steps:
        with suppress(Exception):
            step()
