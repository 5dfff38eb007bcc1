"""Eviction policies behind one interface. Units are numbered from 0.

A policy is told of every step, hint and use, and returns the priority of keeping a unit. Of the units that are not
held, the cache evicts the one with the lowest priority. Belady's policy, which knows the future, is
`scheduler.demand.choice.replay.Belady`.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from scheduler.slots.table import F64, Units
from tpi.errors import PlanError

Key = tuple[int, int]
"""The number of a block in the order of use, and the number of a unit in it: an expert, or some neurons."""
_RECENT = 2.0**-40  # weight of recency against one use: it only breaks ties
_LARGE = 2.0**60  # scores are scaled down when increments exceed this
_PINNED = 2.0**80  # added to the priority of a pinned unit: more than any use gives


class Policy(Protocol):
    """An eviction policy. It has no lock: the cache calls it under a lock of its own."""

    def begin(self) -> None:
        """Begin a step: later uses belong to it."""

    def expect(self, units: Units) -> None:
        """Record the prediction that the next use of a block will be of `units`, all of that block."""

    def use(self, units: Units) -> None:
        """Record that `units`, all of one block, are used now."""

    def priority(self, units: Units) -> F64:
        """Return the priority of keeping each of `units`, float64 `[units]`; only the order of the values matters."""


class Lru:
    """The policy that evicts the least recently used unit."""

    def __init__(self, units: int) -> None:
        self._last = np.zeros(units)
        self._now = 1

    def begin(self) -> None:
        """Do nothing: this policy does not count steps."""

    def expect(self, units: Units) -> None:
        """Ignore the prediction: only uses count."""

    def use(self, units: Units) -> None:
        """Record that `units`, all of one block, are used now."""
        self._last[units] = self._now + np.arange(len(units))
        self._now += len(units)

    def priority(self, units: Units) -> F64:
        """Return the time of each unit's last use; the clock counts uses."""
        priority: F64 = self._last[units]
        return priority


class Lfu:
    """The policy that evicts the least frequently used unit. A use counts half as much after `half_life` steps."""

    def __init__(self, units: int, half_life: float = np.inf) -> None:
        self._score, self._recent = np.zeros(units), Lru(units)
        self._growth = 2.0 ** (1 / half_life)
        self._gain = 1.0  # what a use adds to a score now; it grows with time, so that earlier uses weigh less

    def begin(self) -> None:
        """Begin a step: earlier uses count less from now on."""
        self._gain *= self._growth
        if self._gain > _LARGE:
            self._score /= self._gain
            self._gain = 1.0

    def expect(self, units: Units) -> None:
        """Ignore the prediction: only uses count."""

    def use(self, units: Units) -> None:
        """Record that `units`, all of one block, are used now."""
        self._score[units] += self._gain
        self._recent.use(units)

    def priority(self, units: Units) -> F64:
        """Return the number of uses of each unit, weighted by age; of equal numbers, the latest use counts more."""
        priority: F64 = self._score[units] / self._gain + _RECENT * self._recent.priority(units)
        return priority

    def frequency(self, units: Units) -> F64:
        """Return the share of steps in which each unit was used, 0 to 1; recent steps count more."""
        steps = 1 / (1 - 1 / self._growth)
        frequency: F64 = self._score[units] / self._gain / steps
        return frequency


class Pinned:
    """A policy that keeps some units and evicts the others as `Lru` does."""

    def __init__(self, units: int, pinned: Units) -> None:
        """Pin the units `pinned`. A pinned unit is evicted only if all other units are held."""
        self._bonus, self._recent = np.zeros(units), Lru(units)
        self._bonus[pinned] = _PINNED

    def begin(self) -> None:
        """Do nothing: this policy does not count steps."""

    def expect(self, units: Units) -> None:
        """Ignore the prediction: only uses count."""

    def use(self, units: Units) -> None:
        """Record that `units`, all of one block, are used now."""
        self._recent.use(units)

    def priority(self, units: Units) -> F64:
        """Return the time of each unit's last use, plus a large bonus for pinned units."""
        priority: F64 = self._recent.priority(units) + self._bonus[units]
        return priority


class Importance:
    """The policy that evicts the unit of least importance, v = a + lambda f (DynamicInfer).

    a is 1 for a predicted unit, else 0; f is the unit's frequency of use. A use counts half as much in f after
    `half_life` steps. `weight` is lambda. If there is no hint for a block, the units of its last use are predicted.
    """

    def __init__(self, blocks: Units, half_life: float, weight: float) -> None:
        """Create a policy; `blocks` is the block of each unit, int64 `[units]`."""
        self._frequent = Lfu(len(blocks), half_life)
        self._blocks, self._weight = blocks, weight
        self._predicted = np.zeros(len(blocks))
        self._of_block: dict[int, Units] = {}  # the predicted units of each block

    def begin(self) -> None:
        """Begin a step: earlier uses count less from now on."""
        self._frequent.begin()

    def expect(self, units: Units) -> None:
        """Predict `units`, all of one block, instead of the earlier prediction for that block."""
        if not len(units):
            return
        block = int(self._blocks[units[0]])
        self._predicted[self._of_block.get(block, units)] = 0
        self._predicted[units] = 1
        self._of_block[block] = units

    def use(self, units: Units) -> None:
        """Record that `units`, all of one block, are used now; predict them for the next step."""
        self._frequent.use(units)
        self.expect(units)

    def priority(self, units: Units) -> F64:
        """Return the importance v of each of `units`."""
        priority: F64 = self._predicted[units] + self._weight * self._frequent.frequency(units)
        return priority


Kind = Literal["lru", "lfu", "aged", "pins", "importance"]


@dataclass(frozen=True)
class PolicyChoice:
    """The name and settings of a policy, as stored next to a pack."""

    kind: Kind
    half_life: float = 64  # steps; of `aged` and `importance`
    weight: float = 1  # lambda of `importance`
    pinned: tuple[int, ...] = ()  # units of `pins`

    @property
    def name(self) -> str:
        """Name and settings of the policy, for reports."""
        return {
            "lru": "LRU",
            "lfu": "LFU",
            "aged": f"LFU that halves in {self.half_life:g} steps",
            "pins": f"{len(self.pinned)} pinned, LRU for the others",
            "importance": f"importance a + {self.weight:g} f, f halving in {self.half_life:g} steps",
        }[self.kind]

    def open(self, blocks: Units) -> Policy:
        """Return a new policy with these settings; `blocks` is the block of each unit, int64 `[units]`.

        Raises:
            PlanError: if a setting is out of range.
        """
        if self.half_life <= 0 or self.weight < 0:
            raise PlanError(
                f"an eviction policy with a half-life of {self.half_life:g} steps and a weight of {self.weight:g} is "
                "not possible; the half-life must be above 0 and the weight not negative"
            )
        count = len(blocks)
        if self.kind == "lru":
            return Lru(count)
        if self.kind == "pins":
            return Pinned(count, np.array(self.pinned, np.int64))
        if self.kind == "importance":
            return Importance(blocks, self.half_life, self.weight)
        return Lfu(count) if self.kind == "lfu" else Lfu(count, self.half_life)
