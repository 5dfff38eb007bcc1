"""Which units a cache gives up first: policies behind one interface, on units that are numbered from 0 on.

A policy hears of every step, hint and use, and says what a unit is worth to it; the cache gives up what is worth least
among the units that nobody holds. Belady's, which knows the future, is `scheduler.demand.choice.replay.Belady`.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from tpi.errors import PlanError

Key = tuple[int, int]
"""A block in order of use, and a unit of it: an expert, or some neurons."""
Units = npt.NDArray[np.int64]
"""Numbers of units, of all blocks together."""
F64 = npt.NDArray[np.float64]
_RECENT = 2.0**-40  # of a use counts as much as being used later: it decides between equals
_LARGE = 2.0**60  # increments are made small again beyond this
_PINNED = 2.0**80  # worth more than anything that was used


class Policy(Protocol):
    """What a cache asks. Not safe from several threads: the cache asks under its lock."""

    def begin(self) -> None:
        """A step begins."""

    def expect(self, units: Units) -> None:
        """The next use of a block is said to want `units`, all of that block."""

    def use(self, units: Units) -> None:
        """`units`, all of one block, are used now."""

    def worth(self, units: Units) -> F64:
        """What it is worth to keep each of `units`; only the order counts."""


class Lru:
    """What was used longest ago goes first."""

    def __init__(self, units: int) -> None:
        self._last = np.zeros(units)
        self._now = 1

    def begin(self) -> None:
        """See `Policy.begin`."""

    def expect(self, units: Units) -> None:
        """See `Policy.expect`."""

    def use(self, units: Units) -> None:
        """See `Policy.use`."""
        self._last[units] = self._now + np.arange(len(units))
        self._now += len(units)

    def worth(self, units: Units) -> F64:
        """See `Policy.worth`."""
        worth: F64 = self._last[units]
        return worth


class Lfu:
    """What was used least often goes first; a use counts half after `half_life` steps, if that is given."""

    def __init__(self, units: int, half_life: float = np.inf) -> None:
        self._score, self._recent = np.zeros(units), Lru(units)
        self._growth = 2.0 ** (1 / half_life)
        self._gain = 1.0  # of a use now: those that come later count more, which is the same as ageing the others

    def begin(self) -> None:
        """See `Policy.begin`."""
        self._gain *= self._growth
        if self._gain > _LARGE:
            self._score /= self._gain
            self._gain = 1.0

    def expect(self, units: Units) -> None:
        """See `Policy.expect`."""

    def use(self, units: Units) -> None:
        """See `Policy.use`."""
        self._score[units] += self._gain
        self._recent.use(units)

    def worth(self, units: Units) -> F64:
        """See `Policy.worth`."""
        worth: F64 = self._score[units] / self._gain + _RECENT * self._recent.worth(units)
        return worth

    def frequency(self, units: Units) -> F64:
        """In which share of the steps each was used, recent ones counting more; 0 to 1."""
        steps = 1 / (1 - 1 / self._growth)
        frequency: F64 = self._score[units] / self._gain / steps
        return frequency


class Pinned:
    """Some units stay, those that are used most; the others are replaced as by `Lru`."""

    def __init__(self, units: int, pinned: Units) -> None:
        """If all else is held a pinned one goes too: what is wanted has to be somewhere."""
        self._bonus, self._recent = np.zeros(units), Lru(units)
        self._bonus[pinned] = _PINNED

    def begin(self) -> None:
        """See `Policy.begin`."""

    def expect(self, units: Units) -> None:
        """See `Policy.expect`."""

    def use(self, units: Units) -> None:
        """See `Policy.use`."""
        self._recent.use(units)

    def worth(self, units: Units) -> F64:
        """See `Policy.worth`."""
        worth: F64 = self._recent.worth(units) + self._bonus[units]
        return worth


class Importance:
    """v = a + lambda f (DynamicInfer): a is 1 where a unit is predicted, f is how often it was used.

    Until a hint for a block comes, the units that its last step used are its prediction. `f` forgets by half in
    `half_life` steps; `weight` is lambda.
    """

    def __init__(self, blocks: Units, half_life: float, weight: float) -> None:
        """`blocks` is the block of each unit."""
        self._frequent = Lfu(len(blocks), half_life)
        self._blocks, self._weight = blocks, weight
        self._predicted = np.zeros(len(blocks))
        self._of_block: dict[int, Units] = {}  # what is predicted of each

    def begin(self) -> None:
        """See `Policy.begin`."""
        self._frequent.begin()

    def expect(self, units: Units) -> None:
        """See `Policy.expect`."""
        if not len(units):
            return
        block = int(self._blocks[units[0]])
        self._predicted[self._of_block.get(block, units)] = 0
        self._predicted[units] = 1
        self._of_block[block] = units

    def use(self, units: Units) -> None:
        """See `Policy.use`."""
        self._frequent.use(units)
        self.expect(units)

    def worth(self, units: Units) -> F64:
        """See `Policy.worth`."""
        worth: F64 = self._predicted[units] + self._weight * self._frequent.frequency(units)
        return worth


Kind = Literal["lru", "lfu", "aged", "pins", "importance"]


@dataclass(frozen=True)
class PolicyChoice:
    """A policy by its name and its settings, as it is remembered beside a pack."""

    kind: Kind
    half_life: float = 64  # steps; of `aged` and `importance`
    weight: float = 1  # lambda of `importance`
    pinned: tuple[int, ...] = ()  # units of `pins`

    @property
    def name(self) -> str:
        """What people are told."""
        return {
            "lru": "LRU",
            "lfu": "LFU",
            "aged": f"LFU that halves in {self.half_life:g} steps",
            "pins": f"{len(self.pinned)} pinned, LRU for the others",
            "importance": f"importance a + {self.weight:g} f, f halving in {self.half_life:g} steps",
        }[self.kind]

    def open(self, blocks: Units) -> Policy:
        """The policy for units of these blocks, one entry for each unit.

        Raises:
            PlanError: if a setting means nothing.
        """
        if self.half_life <= 0 or self.weight < 0:
            raise PlanError(f"a policy that halves in {self.half_life:g} steps, with {self.weight:g} f, means nothing")
        count = len(blocks)
        if self.kind == "lru":
            return Lru(count)
        if self.kind == "pins":
            return Pinned(count, np.array(self.pinned, np.int64))
        if self.kind == "importance":
            return Importance(blocks, self.half_life, self.weight)
        return Lfu(count) if self.kind == "lfu" else Lfu(count, self.half_life)
