"""Suppression of text that libraries print to stdout, which is reserved for answers."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import RLock

_one = RLock()  # stdout is shared by all threads


@contextmanager
def stdout_hidden() -> Iterator[None]:
    """Discard what native code prints to stdout within the block. Output of other threads is discarded too."""
    with _one:
        try:
            kept = os.dup(1)
        except OSError:  # stdout is closed
            yield
            return
        _flush()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        try:
            yield
        finally:
            _flush()  # discards output that is still buffered
            os.dup2(kept, 1)
            os.close(kept)
            os.close(nowhere)


def _flush() -> None:
    """Flush the output buffers of Python and of the C library."""
    import ctypes

    with suppress(AttributeError, OSError, ValueError):
        sys.stdout.flush()
    with suppress(AttributeError):
        ctypes.CDLL(None).fflush(None)
