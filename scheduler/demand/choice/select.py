"""The choice of an eviction policy for experts, by replaying the model's own routing with the available slots."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.demand.choice.cliff import DEFAULT_POLICY, without_lru_cliff
from scheduler.demand.choice.replay import Belady, Recording, hits_by_step
from scheduler.demand.choice.sample import sample_layers
from scheduler.demand.policies import Key, Policy, PolicyChoice
from scheduler.slots.table import F64, Units

WINDOWS = 8  # parts of a recording that are compared pairwise
_SURE = 4.029  # Student's t, one-sided, 7 degrees of freedom: 1% for four comparisons together (Bonferroni)
ROBUST_POLICY = PolicyChoice("aged")  # with a recording: within a few percent of the best policy's hits in all so far
_LRU = PolicyChoice("lru")
_PINNED = 0.5  # share of the slots that the policy `pins` pins


def clear_gain(some: F64, others: F64) -> float:
    """Return a lower bound of the mean gain of the hit rates `some` over `others`; 0 or less if the gain may be chance.

    Both are hit rates in the same windows, float64 `[windows]`. The bound is the lower end of the one-sided confidence
    interval of the mean difference (Student, The probable error of a mean, Biometrika 6, 1908). With fewer than
    `WINDOWS` windows, the result is 0.
    """
    if len(some) < WINDOWS:
        return 0.0
    differences = some - others
    return float(differences.mean() - _SURE * differences.std(ddof=1) / WINDOWS**0.5)


@dataclass(frozen=True)
class SelectedPolicy:
    """The chosen eviction policy, and hit rates in the recording.

    `hit_rate`, `lru` and `best` are the hit rates of the chosen policy, of LRU and of Belady's policy. Without a
    recording, `hit_rate` is None.
    """

    choice: PolicyChoice
    hit_rate: float | None = None
    lru: float = 0.0  # hit rate of LRU
    best: float = 0.0  # hit rate of Belady's policy

    @property
    def sentence(self) -> str:
        """Part of a sentence that names the policy and its hit rate beside that of LRU and of Belady's policy."""
        if self.hit_rate is None:
            return f"by {self.choice.name}; the model's routing is not known (tpi profile records it)"
        found = f"{self.hit_rate:.0%} hits in the recorded routing, LRU {self.lru:.0%}, at best {self.best:.0%}"
        return f"by {self.choice.name} ({found})"


def recording_of_experts(experts: npt.NDArray[np.uint16], blocks: Sequence[int], keys: Sequence[Key]) -> Recording:
    """Convert recorded choices of experts, uint16 `[tokens, layers, used]`, to uses of the units in `keys`.

    `blocks[i]` is the block number of layer i. Experts that are not in `keys` belong to another node and are ignored.
    """
    number = {key: at for at, key in enumerate(keys)}

    def uses(token: npt.NDArray[np.uint16]) -> Iterator[Units]:
        for block, chosen in zip(blocks, token.tolist(), strict=True):
            own = [number[block, expert] for expert in dict.fromkeys(chosen) if (block, expert) in number]
            if own:
                yield np.array(own, np.int64)

    return Recording(np.array([block for block, _ in keys], np.int64), tuple(tuple(uses(token)) for token in experts))


@dataclass(frozen=True)
class ReplayedPolicies:
    """Hit rates in the second half of a recording: of each policy, and of Belady's (`best`).

    `windows` has the hit rates of each policy in equal parts of the second half, float64 `[windows]`.
    """

    found: dict[PolicyChoice, float]
    best: float
    windows: dict[PolicyChoice, F64]


def select(recording: Recording, slots: int) -> SelectedPolicy:
    """Return the eviction policy for a cache of `slots` units: `ROBUST_POLICY`, unless another is clearly better.

    Policies see the whole recording; hits are compared in its second half. "Clearly" means by more than chance
    (`scheduler.demand.choice.select`). LRU is never chosen if one token uses more units than there are slots
    (`scheduler.demand.choice.cliff`). Without at least two recorded steps, return `DEFAULT_POLICY`.
    """
    some, room = sample_layers(recording, slots)
    tried = replay_all(some, room)
    if tried is None:
        return SelectedPolicy(DEFAULT_POLICY)
    choice = _clearly_best(tried, room, some.units_per_step)
    found = tried.found[choice]
    return SelectedPolicy(_of_all(choice, recording, slots), found, tried.found[_LRU], max(tried.best, found))


def _clearly_best(tried: ReplayedPolicies, slots: int, per_step: float) -> PolicyChoice:
    robust = tried.windows[ROBUST_POLICY]
    better = [
        choice
        for choice, windows in tried.windows.items()
        if without_lru_cliff(choice, slots, per_step) == choice and clear_gain(windows, robust) > 0
    ]
    return max(better, key=tried.found.__getitem__, default=ROBUST_POLICY)


def _of_all(choice: PolicyChoice, recording: Recording, slots: int) -> PolicyChoice:
    """Return `choice`, made for a sample of layers, with units to pin chosen from all layers.

    A policy that pins no units is returned unchanged.
    """
    if choice.kind != "pins":
        return choice
    return next(one for one in candidates(recording, slots) if one.kind == "pins")


def replay_all(recording: Recording, slots: int) -> ReplayedPolicies | None:
    """Return each policy's hit rate in the second half of a recording, with a cache of `slots` units.

    The cache is empty at the start of the first half. The units that the policy `pins` pins are those that the first
    half uses most. Return None if the recording has fewer than two steps.
    """
    known = recording.of_at_most(slots)
    half = len(known.steps) // 2
    if not half:
        return None
    seen = Recording(known.blocks, known.steps[:half])
    count = min(WINDOWS, len(known.steps) - half)
    firsts = np.linspace(half, len(known.steps), count, endpoint=False).astype(np.int64)
    uses = known.counts_by_step

    def found(policy: Policy) -> tuple[float, F64]:
        hits = hits_by_step(known, policy, slots)
        rates = np.add.reduceat(hits, firsts) / np.maximum(1, np.add.reduceat(uses, firsts))
        return float(hits[half:].sum()) / max(1, int(uses[half:].sum())), rates

    each = {choice: found(choice.open(known.blocks)) for choice in candidates(seen, slots)}
    best, _ = found(Belady(len(known.blocks), known.uses))
    return ReplayedPolicies(
        {one: rate for one, (rate, _) in each.items()}, best, {one: rates for one, (_, rates) in each.items()}
    )


def candidates(seen: Recording, slots: int) -> list[PolicyChoice]:
    """Return the policies to compare. The policy `pins` pins the units that `seen` uses most."""
    often = np.argsort(-seen.counts, kind="stable")
    pinned = tuple(often[: int(_PINNED * slots)].tolist())
    return [DEFAULT_POLICY, _LRU, PolicyChoice("lfu"), ROBUST_POLICY, PolicyChoice("pins", pinned=pinned)]
