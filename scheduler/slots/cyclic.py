"""Slots for units that are used in a fixed cyclic order: each use has its place in a ring. Numbers only, no threads."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from scheduler.model.ring import Ring
from scheduler.slots.cycle import Cycle
from scheduler.slots.shelf import Load
from tpi.errors import TpiError


class CyclicShelf(ABC):
    """A shelf for units in cyclic order: a new unit overwrites the one that was used longest ago.

    The units of a claim are a tuple of one unit, and its slots are the number of its use (`scheduler.slots.cycle`). All
    uses for which the ring has room are loaded ahead. A use whose load failed is loaded again when it is claimed again,
    and so are the uses after it.
    """

    def __init__(self, ring: Ring) -> None:
        """Create a shelf without loads. `resume` begins to load ahead."""
        self.cycle = Cycle(ring)
        self._units = ring.blocks
        self._loading = [0] * len(ring.blocks)  # loads of each place that have not ended
        self._errors: list[Exception | None] = [None] * len(ring.blocks)  # of each place's last load
        self._paused = True
        self._claimed = 0  # the use that `room` found

    @property
    def settling(self) -> bool:
        """False, because slots become free when they are released, not when a load ends."""
        return False

    def resume(self) -> Sequence[Load]:
        """Load ahead from now on; return the loads for which there is room now."""
        self._paused = False
        return self._open()

    def pause(self) -> None:
        """Forget the uses that were loaded ahead; load nothing until `resume`. No load may be queued or running."""
        self._paused = True
        self.cycle.rewind_to(self.cycle.head)

    def room(self, units: tuple[int]) -> int:
        """Return 1 if the unit in `units` can be claimed, else 0; skip all uses before the one to be claimed.

        That is the unit's present use if it is held already, else its next use.
        """
        cycle = self.cycle
        self._claimed = use = cycle.next_use(units[0])
        if cycle.is_pinned(use):
            return 1
        if use != cycle.head:
            self._drop(cycle.skip_to(use))
        if use < cycle.tail and self.failure(use) is not None:
            self._drop(cycle.rewind_to(use))
        return int(use < cycle.tail or (not self._paused and cycle.may_open(use)))

    def claim(self, units: tuple[int]) -> tuple[int, Sequence[Load]]:
        """Pin the use that `room` found; return its number, and the loads for which there is room."""
        loads = self._open()
        self.cycle.pin(self._claimed)
        return self._claimed, loads

    def release(self, slots: int) -> Sequence[Load]:
        """Remove one hold of use number `slots`; after its last hold, return the loads for which there is room.

        If the use's load failed, it becomes the next use again, and no loads are returned.
        """
        if not self.cycle.unpin(slots):
            return ()
        if self._errors[slots % self.cycle.period] is None or self.failure(slots) is None:
            return self._open()
        self._drop(self.cycle.return_to(slots))
        return ()

    def loading(self, slots: int) -> bool:
        """Return True if use number `slots` is loading."""
        return self._loading[slots % self.cycle.period] > 0

    def failure(self, slots: int) -> Exception | None:
        """Return the error of use number `slots`; None if its load did not fail."""
        place = slots % self.cycle.period
        error = self._errors[place]
        return None if error is None or self._loading[place] else error

    def refuse(self, units: tuple[int]) -> TpiError:
        """Return the error to raise for a hold of `units` for which there is no room."""
        return TpiError(f"{self.name_of(units[0])} cannot be held yet: release the other holds first")

    def describe(self, slots: int) -> str:
        """Return the name of the block of use number `slots`, for the trace of a hold that waits."""
        return self.name_of(self._units[slots % self.cycle.period])

    def awaited(self, slots: int, began: float, ended: float) -> None:  # noqa: B027
        """Do nothing; a subclass may record that a hold waited for a use from `began` to `ended`, in seconds."""

    def end(self, load: Load, error: Exception | None) -> None:
        """Mark a load as ended; it failed if `error` is not None."""
        self._loading[load.slots] -= 1
        self._errors[load.slots] = error

    @abstractmethod
    def name_of(self, unit: int) -> str:
        """Return the name of a unit in errors and traces."""

    @abstractmethod
    def load_of(self, use: int, place: int) -> Load | None:
        """Return a new load for use number `use`; None if the unit of this use has no bytes.

        `place` is the position of the use in the period; it becomes the load's `slots`.
        """

    def _open(self) -> Sequence[Load]:
        cycle, loads = self.cycle, list[Load]()
        while not self._paused and cycle.may_open(cycle.tail):
            place = cycle.tail % cycle.period
            if (load := self.load_of(cycle.tail, place)) is not None:
                self._loading[place] += 1
                loads.append(load)
            cycle.tail += 1
        return loads

    def _drop(self, uses: range) -> None:  # noqa: B027
        """Do nothing; a subclass may cancel the loads of `uses`, which were requested and will not be held."""
