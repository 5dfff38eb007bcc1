"""A hold of the units that are in a cache, for a caller that can compute the others on another device."""

from collections.abc import Callable, Sequence

from scheduler.demand.policies import Key
from tpi.devices.pages import Bytes

ChooseCount = Callable[[Sequence[Key], Sequence[Key]], int]
"""Called as `choose(ready, late)` under the cache's lock; returns how many of `late` to load, in their order."""


class SharedHold:
    """Units of one block: `ready` are loaded, `late` are loading in that order, `left` will not be loaded."""

    def __init__(
        self,
        ready: list[Key],
        late: list[Key],
        left: list[Key],
        wait: Callable[[Key], Bytes],
        release: Callable[[], None],
    ) -> None:
        """Create a hold. `wait(key)` returns a unit's bytes when they are loaded; `release()` releases all units."""
        self.ready, self.loading, self.left_out = ready, late, left
        self._wait, self._release = wait, release
        self._closed = False

    def data(self, key: Key) -> Bytes:
        """Return the bytes of a unit of `ready` or `late`, when it is loaded. They are valid until `close`.

        Raises the error of a failed load.
        """
        return self._wait(key)

    def close(self) -> None:
        """Release all units, with a device after the calls that are queued on it. Idempotent."""
        if not self._closed:
            self._closed = True
            self._release()
