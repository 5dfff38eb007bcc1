"""What each policy makes of a recorded run: hits, and bytes per token, beside what Belady's would have reached.

A model's routing decides which policy suits it, so the policy is chosen by replaying its own.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np

from scheduler.demand.policies import F64, Key, Policy, Units
from scheduler.demand.table import SlotTable
from tpi.errors import PlanError


@dataclass(frozen=True)
class Recording:
    """The units that a run used, and the block of each unit that there is.

    Attributes:
        blocks: `[units]`.
        steps: of every step the uses in order, each of units of one block.
    """

    blocks: Units
    steps: tuple[tuple[Units, ...], ...]

    @cached_property
    def uses(self) -> list[Units]:
        """Of all steps, in order."""
        return [use for step in self.steps for use in step]

    @cached_property
    def counts(self) -> Units:
        """`[units]`: how often each was used."""
        return np.bincount(np.concatenate([*self.uses, np.empty(0, np.int64)]), minlength=len(self.blocks))

    @cached_property
    def counts_by_step(self) -> Units:
        """`[steps]`: how many units each used."""
        return np.array([sum(map(len, step)) for step in self.steps], np.int64)

    def of_at_most(self, slots: int) -> "Recording":
        """With uses of at most so many units: a larger one, such as a prompt's, counts as several."""
        size = max(1, slots)
        steps = (
            tuple(use[at : at + size] for use in step for at in range(0, max(1, len(use)), size)) for step in self.steps
        )
        return Recording(self.blocks, tuple(steps))

    @property
    def units_per_step(self) -> float:
        """How many units a step uses, on average."""
        return float(self.counts.sum()) / max(1, len(self.steps))

    @property
    def largest_use(self) -> int:
        """The most units that are used at once."""
        return max(map(len, self.uses), default=0)


@dataclass(frozen=True)
class Replayed:
    """What a policy makes of a recording."""

    name: str
    hits: int
    uses: int
    steps: int
    unit_bytes: int
    loads: int | None = None  # units that came; None: one for each use that was no hit

    @property
    def hit_rate(self) -> float:
        """Share of the uses that need no read; 0 to 1."""
        return self.hits / max(1, self.uses)

    @property
    def bytes_per_step(self) -> float:
        """Bytes that a step, one token of a decode, reads."""
        loads = self.uses - self.hits if self.loads is None else self.loads
        return loads * self.unit_bytes / max(1, self.steps)


class Belady:
    """Belady's policy: what is used farthest in the future goes first. Nothing does better on a recorded run.

    Knows the uses of the run, in order, and has to hear of each of them. L. A. Belady, A study of replacement
    algorithms for a virtual-storage computer, IBM Systems Journal 5(2), 1966.
    """

    def __init__(self, units: int, uses: Sequence[Units]) -> None:
        self._next = np.full(units, np.inf)
        self._after: list[F64] = []  # of each use: when its units are used again
        for at in range(len(uses) - 1, -1, -1):
            self._after.append(self._next[uses[at]])
            self._next[uses[at]] = at

    def begin(self) -> None:
        """See `scheduler.demand.policies.Policy.begin`."""

    def expect(self, units: Units) -> None:
        """See `scheduler.demand.policies.Policy.expect`; it knows better."""

    def use(self, units: Units) -> None:
        """See `scheduler.demand.policies.Policy.use`."""
        self._next[units] = self._after.pop()

    def worth(self, units: Units) -> F64:
        """See `scheduler.demand.policies.Policy.worth`."""
        worth: F64 = -self._next[units]
        return worth


def record(keys: Sequence[Key], steps: Iterable[Sequence[Key]]) -> Recording:
    """A recording of runs over the units `keys`: for each step the wanted ones, in order.

    Neighbours of one block are one use, and a unit counts once in it.
    """
    numbers = {key: number for number, key in enumerate(keys)}

    def uses(step: Sequence[Key]) -> Iterator[Units]:
        for _, group in groupby(step, key=lambda key: key[0]):
            yield np.array([numbers[key] for key in dict.fromkeys(group)], np.int64)

    return Recording(np.array([block for block, _ in keys], np.int64), tuple(tuple(uses(step)) for step in steps))


def replay(recording: Recording, policy: Policy, slots: int, unit_bytes: int = 1, name: str = "") -> Replayed:
    """What `policy` makes of a recording with room for `slots` units, of `unit_bytes` each, empty at first. Errors as
    `hits_by_step`."""
    hits, uses = int(hits_by_step(recording, policy, slots).sum()), int(recording.counts_by_step.sum())
    return Replayed(name, hits, uses, len(recording.steps), unit_bytes)


def hits_by_step(recording: Recording, policy: Policy, slots: int) -> Units:
    """`[steps]`: how many of the uses of each `policy` finds in room for `slots` units, which is empty at first.

    Raises:
        PlanError: if that is less than one use needs at once.
    """
    if recording.largest_use > slots:
        raise PlanError(f"{recording.largest_use} units are used at once, and there is room for {slots}; give it more")
    table = SlotTable(len(recording.blocks), slots)
    hits: Units = recording.counts_by_step.copy()
    for at, step in enumerate(recording.steps):
        policy.begin()
        for units in step:
            hits[at] -= len(table.admit(units, policy))
            policy.use(units)
            table.unpin(units)
    return hits


def bound(recording: Recording, slots: int, unit_bytes: int = 1) -> Replayed:
    """What no policy exceeds. Errors as `replay`."""
    return replay(recording, Belady(len(recording.blocks), recording.uses), slots, unit_bytes, "Belady")


def bound_with_bypass(recording: Recording, first: Units, unit_bytes: int = 1) -> Replayed:
    """What Belady's policy makes of a recording where what is not there may be used elsewhere, and need not come.

    `first` are there when it begins, as many as there is room for. After each use those stay, of what is there and what
    was used, whose next use is soonest.
    """
    nearest, slots = Belady(len(recording.blocks), recording.uses), len(first)
    there = np.zeros(len(recording.blocks), np.bool_)
    there[first] = True
    hits = came = 0
    for units in recording.uses:
        hits += int(there[units].sum())
        nearest.use(units)
        both = np.union1d(np.flatnonzero(there), units)
        kept = both[np.argsort(-nearest.worth(both), kind="stable")[:slots]]
        came += int((~there[kept]).sum())
        there[:] = False
        there[kept] = True
    uses = int(recording.counts.sum())
    return Replayed("Belady", hits, uses, len(recording.steps), unit_bytes, came)
