"""The policy for a cache of experts, by what each makes of the model's own routing with as much room as there is."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.demand.choice.cliff import GUARDED, sensible
from scheduler.demand.choice.replay import Recording, bound, replay
from scheduler.demand.policies import Key, PolicyChoice, Units

_PINNED = 0.5  # of the slots


@dataclass(frozen=True)
class Selected:
    """A policy, and the share of uses that it would have found in memory; None where nothing was recorded."""

    choice: PolicyChoice
    hit_rate: float | None = None
    lru: float = 0.0  # the same of the plainest one
    best: float = 0.0  # of Belady's

    @property
    def sentence(self) -> str:
        """For people."""
        if self.hit_rate is None:
            return f"by {self.choice.name}, for nothing is known of the model's routing (tpi profile records it)"
        found = f"{self.hit_rate:.0%} in its recorded routing, LRU {self.lru:.0%}, at best {self.best:.0%}"
        return f"by {self.choice.name} ({found})"


def of_experts(experts: npt.NDArray[np.uint16], blocks: Sequence[int], keys: Sequence[Key]) -> Recording:
    """What `[tokens, layers, used]` experts are as uses of the units `keys`; `blocks` is the block of each layer.

    What `keys` lack is another node's.
    """
    number = {key: at for at, key in enumerate(keys)}

    def uses(token: npt.NDArray[np.uint16]) -> Iterator[Units]:
        for block, chosen in zip(blocks, token.tolist(), strict=True):
            own = [number[block, expert] for expert in dict.fromkeys(chosen) if (block, expert) in number]
            if own:
                yield np.array(own, np.int64)

    return Recording(np.array([block for block, _ in keys], np.int64), tuple(tuple(uses(token)) for token in experts))


@dataclass(frozen=True)
class Tried:
    """The share of the second half's uses that each policy finds, and Belady's."""

    found: dict[PolicyChoice, float]
    best: float


def select(recording: Recording, slots: int) -> Selected:
    """The policy that finds most of what the second half uses, when the first half has warmed it up.

    LRU is out of the question below one token's units, whatever it found (`scheduler.demand.choice.cliff`).
    """
    tried = try_all(recording, slots)
    if tried is None:
        return Selected(GUARDED)
    per_step = recording.units_per_step
    allowed = [choice for choice in tried.found if sensible(choice, slots, per_step) == choice]
    choice = max(allowed, key=tried.found.__getitem__)
    found = tried.found[choice]
    return Selected(choice, found, tried.found[PolicyChoice("lru")], max(tried.best, found))


def try_all(recording: Recording, slots: int) -> Tried | None:
    """Every policy, empty at first; what is pinned is chosen from the first half. None of less than two steps."""
    known = recording.of_at_most(slots)
    half = len(known.steps) // 2
    if not half:
        return None
    seen = Recording(known.blocks, known.steps[:half])
    uses = max(1, int(known.counts.sum() - seen.counts.sum()))

    def found(choice: PolicyChoice) -> float:
        both = replay(known, choice.open(known.blocks), slots).hits
        return (both - replay(seen, choice.open(known.blocks), slots).hits) / uses

    best = (bound(known, slots).hits - bound(seen, slots).hits) / uses
    return Tried({choice: found(choice) for choice in candidates(seen, slots)}, best)


def candidates(seen: Recording, slots: int) -> list[PolicyChoice]:
    """The policies that are tried; what is pinned is what `seen` uses most."""
    often = np.argsort(-seen.counts, kind="stable")
    pinned = tuple(often[: int(_PINNED * slots)].tolist())
    return [
        GUARDED,
        PolicyChoice("lru"),
        PolicyChoice("lfu"),
        PolicyChoice("aged"),
        PolicyChoice("pins", pinned=pinned),
    ]
