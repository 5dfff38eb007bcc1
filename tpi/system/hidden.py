"""Libraries that print: what they write to stdout, which is for answers, goes nowhere."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import RLock

_one = RLock()  # stdout is the process's


@contextmanager
def stdout_hidden() -> Iterator[None]:
    """What native code prints to stdout within the block is dropped; so is what other threads print meanwhile."""
    with _one:
        try:
            kept = os.dup(1)
        except OSError:  # there is none
            yield
            return
        _flush()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        try:
            yield
        finally:
            _flush()  # what it has kept back so far
            os.dup2(kept, 1)
            os.close(kept)
            os.close(nowhere)


def _flush() -> None:
    """Python's stdout, and C's."""
    import ctypes

    with suppress(AttributeError, OSError, ValueError):
        sys.stdout.flush()
    with suppress(AttributeError):
        ctypes.CDLL(None).fflush(None)
