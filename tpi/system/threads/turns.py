"""Error handling for threads that repeat the same work: an exception ends only the current turn."""

from collections.abc import Iterator
from contextlib import contextmanager

from tpi.progress import warn


class Turns:
    """The work that one thread repeats, in turns.

    An exception in a turn ends that turn only, and the first one is reported as a warning.
    """

    def __init__(self, what: str) -> None:
        """Create the turns of a thread.

        `what` names the thread's work in the warning about a failure: "`what` failed (...)".
        """
        self._what = what
        self._warned = False

    @contextmanager
    def one(self) -> Iterator[None]:
        """Run the block as one turn of the thread."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the next turn may succeed
            if not self._warned:
                warn(f"{self._what} failed ({named(error)}); it is tried again")
            self._warned = True


def named(error: Exception) -> str:
    """Return the name of an error's class, followed by its message if it has one."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
