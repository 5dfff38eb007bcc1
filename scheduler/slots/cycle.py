"""The index of a cyclic memory: which uses of streamed blocks are loaded, held or over. Numbers only.

Streamed uses are numbered 0, 1, 2, ... in cyclic order; use n is of block `ring.blocks[n % period]`.

    0 ... released ... head ... tail ...
    over | held, or skipped | loaded or being loaded | not yet requested

The second line says in which state the uses between two of these numbers are. The load of use `tail` may be requested
once use `tail - lag` is over. `scheduler.model.ring` defines the lag and proves that a hold cannot deadlock. The block
loop need not keep the order: holding another block skips ahead to that block's next use.
"""

from scheduler.model.ring import Ring


class Cycle:
    """The uses of a ring: each time that a block of the ring is computed is one use, numbered from 0.

    A use is over, held, loaded, or not loaded yet.
    """

    def __init__(self, ring: Ring) -> None:
        self.period = len(ring.blocks)
        self.length = len(set(ring.blocks))  # uses in one cycle
        self.head = 0  # the use that comes next in the block loop
        self.tail = 0  # the use that is loaded next
        self._ring = ring
        self._released = 0
        self._pins: dict[int, int] = {}  # number of holds of each use
        self._place = {block: use for use, block in reversed(list(enumerate(ring.blocks)))}

    def next_use(self, block: int) -> int:
        """Return the number of the use of `block` that is held now or, if none is, of its next use."""
        for use in self._pins:
            if self._ring.blocks[use % self.period] == block:
                return use
        return self.head + (self._place[block] - self.head) % self.length

    def may_open(self, use: int) -> bool:
        """Return True if use number `use` may be loaded, because every use that it overwrites is over."""
        return bool(self.period) and use - self._ring.lags[use % self.period] < self._released

    def overwritten(self, use: int) -> int:
        """Return the position in the period, 0 to `period` - 1, of the last use that `use` overwrites in the ring."""
        return (use - self._ring.lags[use % self.period]) % self.period

    def skip_to(self, use: int) -> range:
        """Skip the uses before `use`; return the skipped uses whose load was requested."""
        skipped = range(self.head, min(use, self.tail))
        if use > self.head:
            self.head, self.tail = use, max(use, self.tail)
            self._release()
        return skipped

    def rewind_to(self, use: int) -> range:
        """Mark `use` and all later uses as not requested; return the uses whose load had been requested."""
        opened = range(use, self.tail)
        self.tail = use
        return opened

    def return_to(self, use: int) -> range:
        """Make `use`, which is not held, the next use again; return the requested uses from `use` on."""
        opened = self.rewind_to(use)
        self.head = use
        self._release()
        return opened

    def is_pinned(self, use: int) -> bool:
        """Return True if the use is held."""
        return use in self._pins

    def pin(self, use: int) -> None:
        """Count one more hold of a use."""
        self._pins[use] = self._pins.get(use, 0) + 1
        self.head = max(self.head, use + 1)

    def unpin(self, use: int) -> bool:
        """Remove one hold of a use; return True if it was the last."""
        self._pins[use] -= 1
        if self._pins[use]:
            return False
        del self._pins[use]
        self._release()
        return True

    def _release(self) -> None:
        self._released = min(self._pins, default=self.head)
