"""Replays of a recorded run with a policy: hits, bytes per token, and the bound by Belady's policy.

The best policy depends on the model's routing, so it is chosen by replaying recorded routing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from scheduler.demand.policies import Policy
from scheduler.slots.table import F64, SlotTable, Units
from tpi.errors import PlanError


@dataclass(frozen=True)
class Recording:
    """The units that a run used.

    Attributes:
        blocks: the block of each unit, int64 `[units]`.
        steps: the uses of each step in order; a use is the units of one block that are used at once.
    """

    blocks: Units
    steps: tuple[tuple[Units, ...], ...]

    @cached_property
    def uses(self) -> list[Units]:
        """All uses of all steps, in the order in which they happened."""
        return [use for step in self.steps for use in step]

    @cached_property
    def counts(self) -> Units:
        """Number of uses of each unit, int64 `[units]`."""
        return np.bincount(np.concatenate([*self.uses, np.empty(0, np.int64)]), minlength=len(self.blocks))

    @cached_property
    def counts_by_step(self) -> Units:
        """Number of units that each step used, int64 `[steps]`."""
        return np.array([sum(map(len, step)) for step in self.steps], np.int64)

    def of_at_most(self, slots: int) -> "Recording":
        """Return the recording with every use of more than `slots` units, such as a prompt's, divided into smaller
        ones.
        """
        size = max(1, slots)
        steps = (
            tuple(use[at : at + size] for use in step for at in range(0, max(1, len(use)), size)) for step in self.steps
        )
        return Recording(self.blocks, tuple(steps))

    @property
    def units_per_step(self) -> float:
        """Mean number of units that a step uses."""
        return float(self.counts.sum()) / max(1, len(self.steps))

    @property
    def largest_use(self) -> int:
        """Largest number of units that are used at once."""
        return max(map(len, self.uses), default=0)


@dataclass(frozen=True)
class ReplayResult:
    """The result of replaying a recording with a policy."""

    name: str
    hits: int
    uses: int
    steps: int
    unit_bytes: int
    loads: int | None = None  # units that were loaded; None: one for each use that was not a hit

    @property
    def hit_rate(self) -> float:
        """Share of the uses that need no load, 0 to 1."""
        return self.hits / max(1, self.uses)

    @property
    def bytes_per_step(self) -> float:
        """Bytes that are loaded per step, which is one token when decoding."""
        loads = self.uses - self.hits if self.loads is None else self.loads
        return loads * self.unit_bytes / max(1, self.steps)


class Belady:
    """Belady's policy, which evicts the unit whose next use is farthest in the future. No policy has more hits.

    The constructor gets the uses of a run; then `use` must be called for each of them, in order. L. A. Belady, A study
    of replacement algorithms for a virtual-storage computer, IBM Systems Journal 5(2), 1966.
    """

    def __init__(self, units: int, uses: Sequence[Units]) -> None:
        self._next = np.full(units, np.inf)
        self._after: list[F64] = []  # for each use, when its units are used again
        for at in range(len(uses) - 1, -1, -1):
            self._after.append(self._next[uses[at]])
            self._next[uses[at]] = at

    def begin(self) -> None:
        """Do nothing: this policy does not count steps."""

    def expect(self, units: Units) -> None:
        """Ignore the prediction: this policy knows all later uses."""

    def use(self, units: Units) -> None:
        """Advance to the next use of the run, which must be of `units`."""
        self._next[units] = self._after.pop()

    def priority(self, units: Units) -> F64:
        """Return the negative time of each unit's next use, so that the farthest has the lowest priority."""
        priority: F64 = -self._next[units]
        return priority


def replay(recording: Recording, policy: Policy, slots: int, unit_bytes: int = 1, name: str = "") -> ReplayResult:
    """Replay a recording with a cache of `slots` units of `unit_bytes` each, which is empty at first.

    Errors are those of `hits_by_step`.
    """
    hits, uses = int(hits_by_step(recording, policy, slots).sum()), int(recording.counts_by_step.sum())
    return ReplayResult(name, hits, uses, len(recording.steps), unit_bytes)


def hits_by_step(recording: Recording, policy: Policy, slots: int) -> Units:
    """Return the number of hits in each step, int64 `[steps]`, with a cache of `slots` units that is empty at first.

    Raises:
        PlanError: if one use needs more than `slots` units at once.
    """
    if recording.largest_use > slots:
        raise PlanError(
            f"{recording.largest_use} units are used at once, and the cache has room for {slots}; give it more slots"
        )
    table = SlotTable(len(recording.blocks), slots)
    hits: Units = recording.counts_by_step.copy()
    for at, step in enumerate(recording.steps):
        policy.begin()
        for units in step:
            lacking = table.admit(units, policy.priority)
            policy.use(units)
            hits[at] -= len(lacking)
            table.end(table.slot_of[lacking], arrived=True)
            table.unpin(table.slot_of[units])
    return hits


def bound(recording: Recording, slots: int, unit_bytes: int = 1) -> ReplayResult:
    """Replay a recording with Belady's policy, the upper bound of any policy's hits. Errors are those of `replay`."""
    return replay(recording, Belady(len(recording.blocks), recording.uses), slots, unit_bytes, "Belady")


def bound_with_bypass(recording: Recording, first: Units, unit_bytes: int = 1) -> ReplayResult:
    """Replay a recording with Belady's policy, in a cache that may leave out a unit that was just used.

    `first` are the units in the cache at the start; their number is the cache's size. After each use, the cache keeps
    the units whose next use is soonest, out of those in the cache and those just used.
    """
    nearest, slots = Belady(len(recording.blocks), recording.uses), len(first)
    there = np.zeros(len(recording.blocks), np.bool_)
    there[first] = True
    hits = came = 0
    for units in recording.uses:
        hits += int(there[units].sum())
        nearest.use(units)
        both = np.union1d(np.flatnonzero(there), units)
        kept = both[np.argsort(-nearest.priority(both), kind="stable")[:slots]]
        came += int((~there[kept]).sum())
        there[:] = False
        there[kept] = True
    uses = int(recording.counts.sum())
    return ReplayResult("Belady", hits, uses, len(recording.steps), unit_bytes, came)
