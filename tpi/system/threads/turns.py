"""Threads that look around again and again, whatever fails in one of their turns."""

from collections.abc import Iterator
from contextlib import contextmanager

from tpi.progress import warn


class Turns:
    """Of one thread. What fails in a turn ends that turn alone, and is said the first time."""

    def __init__(self, what: str) -> None:
        """`what` the thread does, as a sentence about it begins."""
        self._what = what
        self._said = False

    @contextmanager
    def one(self) -> Iterator[None]:
        """A turn."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, the next turn may do
            if not self._said:
                warn(f"{self._what} failed ({named(error)}); it is tried again")
            self._said = True


def named(error: Exception) -> str:
    """What an error is called, and what it says, if it says anything."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
