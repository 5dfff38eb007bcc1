"""A hold of the units that are in a cache, for a caller that can compute the others on another device."""

from collections.abc import Callable, Sequence

from scheduler.demand.policies import Key
from tpi.devices.pages import Bytes

ChooseCount = Callable[[Sequence[Key], Sequence[Key]], int]
"""Called as `choose(ready, late)` under the cache's lock; returns how many of `late` to load, in their order."""


class SharedHold:
    """A hold of units of one block, for a caller that computes the units in `left_out` elsewhere.

    The units in `ready` are loaded; those in `loading` are being loaded, in this order. The units in `left_out` are not
    held.
    """

    def __init__(
        self,
        ready: list[Key],
        late: list[Key],
        left: list[Key],
        wait: Callable[[Key], Bytes],
        release: Callable[[], None],
    ) -> None:
        """Create a hold. `wait(key)` returns a loaded unit's bytes; `release()` releases all units."""
        self.ready, self.loading, self.left_out = ready, late, left
        self._wait, self._release = wait, release
        self._closed = False

    def data(self, key: Key) -> Bytes:
        """Wait until a unit of `ready` or `loading` is loaded; return its bytes, which are valid until `close`.

        If the load failed, raise its error.
        """
        return self._wait(key)

    def close(self) -> None:
        """Release all units; if a device uses them, after the calls that are queued on it. Further calls do nothing."""
        if not self._closed:
            self._closed = True
            self._release()
