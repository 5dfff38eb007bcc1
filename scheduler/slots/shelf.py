"""Shelf of a `scheduler.slots.cache.SlotCache`: which unit lies in which slot. Numbers only, no threads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol

import numpy as np
import numpy.typing as npt

from scheduler.slots.stats import LoadStats
from scheduler.slots.table import N, Priority, Slots, SlotTable
from tpi.errors import PlanError, TpiError


@dataclass(eq=False)
class Load:
    """Units on their way into their slots, which one call of a source fills.

    Attributes:
        shelf: where the slots are.
        units: the units, as the shelf numbers them.
        slots: their slots, which are marked as loading.
        name: the load's name in traces; empty if the transfer that makes it is traced.
        title: the name of the transfer that makes it.
        lane: the number of the link that makes the load; loads of one lane end in order.
        in_turn: True if only one load with `in_turn` may run at a time, over all lanes.
        parts: how many calls of the source fill it; threads take parts one by one.
        begun: how many of the parts have begun.
        running: how many of the parts have begun and not ended.
        cancelled: True if it is not wanted any more; no further part begins.
        followed: True if a thread waits for single parts.
        error: the error of a part that failed.
        aborts: how many steps had been aborted when it was queued.
    """

    shelf: Any
    units: Any
    slots: Any
    name: str = ""
    title: str = ""
    lane: int = 0
    in_turn: bool = False
    parts: int = 1
    begun: int = 0
    running: int = 0
    cancelled: bool = False
    followed: bool = False
    error: Exception | None = None
    aborts: int = 0

    def may_begin(self) -> bool:
        """Return True if the first part may begin now."""
        return True

    def arrived(self, part: int) -> None:
        """Do nothing; a subclass may record that part number `part` was filled."""


class Shelf(Protocol):
    """An index of slots with an eviction policy. The cache calls it under its lock.

    The types of `units` and `slots`, such as arrays or numbers, depend on the shelf.
    """

    @property
    def settling(self) -> bool:
        """True if the end of a running load will make more room."""

    def room(self, units: Any) -> int:
        """Return how many of `units`, counted from the first, can be claimed now."""

    def claim(self, units: Any) -> tuple[Any, Sequence[Load]]:
        """Pin `units`, for which there is room; return their slots, and the loads to begin."""

    def release(self, slots: Any) -> Sequence[Load]:
        """Remove one pin from each of `slots`; return the loads for which there is room now."""

    def loading(self, slots: Any) -> bool:
        """Return True if one of `slots` is loading."""

    def failure(self, slots: Any) -> Exception | None:
        """Return the error of one of `slots` whose load failed; None if none failed."""

    def describe(self, slots: Any) -> str:
        """Return the name that traces show while a hold waits for `slots`."""

    def awaited(self, slots: Any, began: float, ended: float) -> None:
        """Record that a hold waited for `slots` from `began` to `ended`, in seconds."""

    def refuse(self, units: Any) -> TpiError:
        """Return the error to raise for a hold of `units` that find no room even after all loads have ended."""

    def end(self, load: Load, error: Exception | None) -> None:
        """Mark a load as ended; it failed if `error` is not None."""


class PriorityShelf(Generic[N]):
    """A `Shelf` of equal slots that evicts the unit with the lowest priority. The cache calls it under its lock."""

    def __init__(self, name: str, table: SlotTable[N], priority: Priority, stats: LoadStats) -> None:
        """Create a shelf over `table`.

        Args:
            name: the shelf's name in errors and traces.
            table: the index.
            priority: returns the priority of keeping each unit; units with the lowest are evicted first.
            stats: where hits and misses are counted.
        """
        self.name, self.table, self.stats = name, table, stats
        self._priority = priority
        self._errors: dict[int, Exception] = {}  # by slot; valid while the table says that the slot has failed

    @property
    def settling(self) -> bool:
        """True if the end of a running load will make more room."""
        return self.table.settling

    def room(self, units: npt.NDArray[N]) -> int:
        """Return how many of `units`, counted from the first, can be claimed now."""
        return self.table.room_for(units)

    def claim(self, units: npt.NDArray[N]) -> tuple[npt.NDArray[N], Sequence[Load]]:
        """Pin `units`, for which there is room; return their slots, and the loads of units that are not loaded.

        Units whose load failed are loaded again.
        """
        missing = self.table.admit(units, self._priority)
        self.stats.misses += len(missing)
        self.stats.hits += len(units) - len(missing)
        return self.table.slot_of[units], self._loads(missing) if len(missing) else ()

    def release(self, slots: Slots) -> Sequence[Load]:
        """Remove one pin from each of `slots`; return the loads for which there is room now."""
        self.table.unpin(slots)
        return ()

    def loading(self, slots: Slots) -> bool:
        """Return True if one of `slots` is loading."""
        return bool(self.table.loading[slots].any())

    def failure(self, slots: Slots) -> Exception | None:
        """Return the error of one of `slots` whose load failed; None if none failed."""
        if self.table.none_failed:
            return None
        failed = self.table.failed[slots]
        return self._errors[int(slots[failed][0])] if failed.any() else None

    def describe(self, slots: Slots) -> str:
        """Return the shelf's name, which traces show while a hold waits for `slots`."""
        return self.name

    def awaited(self, slots: Slots, began: float, ended: float) -> None:
        """Do nothing: this shelf does not record waits."""

    def refuse(self, units: npt.NDArray[N]) -> TpiError:
        """Return the error to raise for a hold of `units` that do not fit, even after all loads have ended."""
        return PlanError(
            f"{len(units)} neurons of {self.name} cannot be held at once: memory has room for {len(self.table)}; raise "
            "--memory"
        )

    def end(self, load: Load, error: Exception | None) -> None:
        """Mark a load as ended; it failed if `error` is not None."""
        if error is not None:
            self._errors |= dict.fromkeys(np.arange(len(self.table))[load.slots].tolist(), error)
        self.table.end(load.slots, arrived=error is None)

    def _loads(self, missing: npt.NDArray[N]) -> Sequence[Load]:
        return [Load(self, missing, self.table.slot_of[missing], self.name)]
