"""Weights that are visited several times in a step, and held from the first visit to the last."""

from collections.abc import Sequence
from types import TracebackType

from scheduler.weights import Hold
from tpi.devices.pages import Bytes


class LongHold:
    """A hold for so many visits: see `begin`. Without one, for a single visit."""

    def __init__(self, hold: Hold) -> None:
        self._hold = hold
        self._visits = 0  # left
        self._data: Bytes | None = None

    def begin(self, visits: int) -> None:
        """A step begins that makes so many visits."""
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
        """Give it back, if it is held: the step is over, or breaks off."""
        if self._data is not None:
            self._data = None
            self._hold.__exit__(None, None, None)


def close_all(holds: Sequence[LongHold]) -> None:
    """Give all of them back."""
    for hold in holds:
        hold.close()
