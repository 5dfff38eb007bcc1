"""The two shelves of a window: blocks that stay, and blocks that pass through a ring. Numbers only, no threads."""

import time
from collections.abc import Callable, Iterable, Sequence

from scheduler.model.ring import Ring
from scheduler.slots.cyclic import CyclicShelf
from scheduler.slots.shelf import Load
from scheduler.window.load import BlockLoad
from scheduler.window.stats import Meter
from tpi.errors import TpiError
from tpi.trace import NoTrace

MakeLoad = Callable[[object, int, int], BlockLoad]
"""Called as `make(shelf, block, place)`; returns a load of `block`."""


class LoadLog:
    """A recorder of loads and waits, for reports and traces. Used under the cache's lock."""

    def __init__(self, meter: Meter, trace: NoTrace, noun: str) -> None:
        """Write to `meter` and `trace`; blocks are called `noun`."""
        self._meter, self._trace, self._noun = meter, trace, noun
        self._last = time.perf_counter()  # when a load ended

    def name(self, block: int) -> str:
        """Return the name of a block."""
        return f"{self._noun} {block}"

    def loaded(self, load: BlockLoad) -> None:
        """Record that a load has ended, for reports and traces."""
        load.ended = now = time.perf_counter()
        begun = max(load.requested, self._last)  # chunks of two loads may overlap, but each second counts once
        self._last = now
        self._meter.loaded(load.block, now - begun)
        self._trace.add("load", self.name(load.block), int(begun * 1e9), int(now * 1e9))

    def waited(self, load: BlockLoad, began: float, ended: float) -> None:
        """Record that a hold waited for `load` from `began` to `ended`, in seconds."""
        self._meter.waited(ended - max(began, load.ended))


class StreamedShelf(CyclicShelf):
    """The shelf of the blocks that pass through a window's ring.

    The position of a use in the ring's period is its slot.
    """

    def __init__(self, ring: Ring, make: MakeLoad, log: LoadLog) -> None:
        """Create a shelf; `make` creates its loads, and `log` records them."""
        super().__init__(ring)
        self._make, self._log = make, log
        self.loads = [make(self, block, place) for place, block in enumerate(ring.blocks)]  # the last of each place
        self._stragglers = 0  # number of cancelled loads with chunks that are still being read

    def name_of(self, unit: int) -> str:
        """Return the name of the block `unit`, for messages and traces."""
        return self._log.name(unit)

    def load_of(self, use: int, place: int) -> Load | None:
        """Return a new load for use number `use`, in the place number `place`; None if the use's block has no bytes."""
        if not self.loads[place].extent.slot_bytes:
            return None
        self.loads[place] = load = self._make(self, self._units[place], place)
        return load

    def may_begin(self, load: Load) -> bool:
        """Return True unless a chunk of a cancelled load is still being read, perhaps into the memory of `load`."""
        return not self._stragglers

    def awaited(self, slots: int, began: float, ended: float) -> None:
        """Record that a hold waited for use number `slots` from `began` to `ended`, in seconds."""
        self._log.waited(self.loads[slots % self.cycle.period], began, ended)

    def end(self, load: Load, error: Exception | None) -> None:
        """Mark a load as ended; it failed if `error` is not None."""
        if load.cancelled:
            self._loading[load.slots] -= 1
            self._stragglers -= 1
            return
        super().end(load, error)
        if error is None:
            self._log.loaded(self.loads[load.slots])

    def forget(self) -> None:
        """Stop loading, and drop the references to all memory.

        Without this, the memory would not be freed at once, because loads and shelf refer to each other.
        """
        self._paused = True
        self.loads = []

    def _drop(self, uses: range) -> None:
        """Cancel the loads of `uses`. Their memory is free once the reads that are in flight have ended."""
        for use in uses if self.loads else ():
            place = use % self.cycle.period
            load = self.loads[place]
            if self._loading[place] and not load.cancelled:
                load.cancelled, load.parts = True, load.begun
                if load.running:
                    self._stragglers += 1
                else:
                    self._loading[place] -= 1


class ResidentShelf:
    """The blocks that stay in memory, each loaded once into a place of its own.

    A block whose load failed is loaded again when it is held.
    """

    settling = False

    def __init__(self, blocks: Iterable[int], make: MakeLoad, log: LoadLog) -> None:
        """Create a shelf. The arguments are those of `StreamedShelf`."""
        self._make, self._log = make, log
        self.loads = {block: make(self, block, block) for block in blocks}
        self._loading = {block for block, load in self.loads.items() if load.parts}

    def first(self) -> Sequence[BlockLoad]:
        """Return the loads of all blocks that have bytes."""
        return [self.loads[block] for block in sorted(self._loading)]

    def room(self, units: tuple[int]) -> int:
        """Return 1: each block has a place."""
        return 1

    def claim(self, units: tuple[int]) -> tuple[int, Sequence[Load]]:
        """Return the block of `units` as its slot, and a new load if its last load failed."""
        (block,) = units
        if self.failure(block) is None:
            return block, ()
        self.loads[block] = load = self._make(self, block, block)
        self._loading.add(block)
        return block, (load,)

    def release(self, slots: int) -> Sequence[Load]:
        """Do nothing, because resident blocks are never evicted."""
        return ()

    def loading(self, slots: int) -> bool:
        """Return True if block number `slots` is loading."""
        return slots in self._loading

    def failure(self, slots: int) -> Exception | None:
        """Return the error of block number `slots`; None if its load did not fail."""
        return None if slots in self._loading else self.loads[slots].error

    def describe(self, slots: int) -> str:
        """Return the name of block number `slots`, for the trace of a hold that waits."""
        return self._log.name(slots)

    def awaited(self, slots: int, began: float, ended: float) -> None:
        """Record that a hold waited for block number `slots` from `began` to `ended`, in seconds."""
        self._log.waited(self.loads[slots], began, ended)

    def refuse(self, units: tuple[int]) -> TpiError:
        """Return the error for a block that cannot be held. It is never raised: a ring has room for every block."""
        return TpiError(f"{self._log.name(units[0])} cannot be held")

    def forget(self) -> None:
        """Drop the references to all memory.

        Without this, the memory would not be freed at once, because loads and shelf refer to each other.
        """
        self.loads = {}

    def may_begin(self, load: Load) -> bool:
        """Return True: no other load uses the block's place."""
        return True

    def end(self, load: Load, error: Exception | None) -> None:
        """Mark a load as ended; it failed if `error` is not None."""
        self._loading.discard(load.slots)
        if error is None:
            self._log.loaded(self.loads[load.slots])
