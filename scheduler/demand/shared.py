"""A hold of what is in a cache by someone who can do without the rest, because another device has it, too."""

from collections.abc import Callable, Sequence

from scheduler.demand.policies import Key
from tpi.devices.pages import Bytes

Choose = Callable[[Sequence[Key], Sequence[Key]], int]
"""How many of the second to have loaded, in their order, where the first are there. Asked under the cache's lock."""


class SharedHold:
    """Units of one block: `ready` are there, `late` are on their way in that order, `left` are not coming."""

    def __init__(
        self,
        ready: list[Key],
        late: list[Key],
        left: list[Key],
        wait: Callable[[Key], Bytes],
        release: Callable[[], None],
    ) -> None:
        """`wait(key)` gives a unit's bytes when they are there; `release` gives all of them back."""
        self.ready, self.late, self.left = ready, late, left
        self._wait, self._release = wait, release
        self._closed = False

    def data(self, key: Key) -> Bytes:
        """The bytes of one that is ready or late, when it is there; until `close`.

        Raises what its load failed with.
        """
        return self._wait(key)

    def close(self) -> None:
        """Give all back, when the device is through with what it was told so far. Idempotent."""
        if not self._closed:
            self._closed = True
            self._release()
