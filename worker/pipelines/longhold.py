"""Holds of weights that a step visits several times, from the first visit to the last."""

from collections.abc import Sequence
from types import TracebackType

from scheduler.weights import Hold
from tpi.devices.pages import Bytes


class LongHold:
    """A hold of weights that lasts for several `with` statements of a step.

    The first statement acquires the hold, and the last releases it. `begin` sets the number of statements; without it,
    that number is 1.
    """

    def __init__(self, hold: Hold) -> None:
        self._hold = hold
        self._visits = 0  # visits that are left
        self._data: Bytes | None = None

    def begin(self, visits: int) -> None:
        """Begin a step in which `visits` statements will enter the hold."""
        self._visits = visits

    def __enter__(self) -> Bytes:
        if self._data is None:
            self._data = self._hold.__enter__()
        return self._data

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._visits -= 1
        if self._visits <= 0:
            self.close()

    def close(self) -> None:
        """End the hold, if there is one, at the end of a step or when it is aborted."""
        if self._data is not None:
            self._data = None
            self._hold.__exit__(None, None, None)


def close_all(holds: Sequence[LongHold]) -> None:
    """End each of `holds`."""
    for hold in holds:
        hold.close()
