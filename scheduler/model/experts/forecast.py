"""What a node with some of its experts on an accelerator, on demand, is predicted to take: the best way to set it up.

All else stays on the accelerator. How many slots that leaves, how often an expert is found in one, and which of the
others are fetched, gives the seconds of a token; a prompt takes its experts to the accelerator in a cycle, or computes
them where they lie, as in `scheduler.model.offload`, which judges that part.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import comb

from scheduler.model.experts.costs import ExpertCosts, divide
from scheduler.model.offload.crossover import NEVER, first_from
from scheduler.model.offload.forecast import StretchForecast, forecast, step_seconds
from scheduler.model.offload.memory import Peaks, peaks
from scheduler.model.offload.problem import Problem
from scheduler.model.offload.work import KV_TIERS, NodeWork, Offload, Place, SegmentWork, StepSize, Tier
from tpi.devices.pages import PAGE, round_up

HitRate = Callable[[int], float]
"""The share of the wanted experts that so many slots are expected to have; 0 to 1."""


@dataclass(frozen=True)
class ExpertWork:
    """The routed experts of a node: `blocks` of them, each with `experts` of the node's, of which a token uses `used`.

    `nbytes` and `weights` are of one expert's slice, `shared` bytes of what a block computes beside.
    """

    blocks: int
    experts: int
    used: int
    nbytes: int
    weights: int
    shared: int = 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of the accelerator's memory that one takes."""
        return round_up(self.nbytes)

    @property
    def units(self) -> int:
        """All of them."""
        return self.blocks * self.experts


@dataclass(frozen=True)
class DemandForecast:
    """`slots` experts on the accelerator, all else as `offload` says; seconds of a whole request, and of a token.

    Of the wanted experts `hit_rate` are there, and `fetched` and `computed_here` of them are not: shares of all.
    """

    offload: Offload
    slots: int
    hit_rate: float
    fetched: float
    computed_here: float
    prompt: StretchForecast
    prompt_seconds: float  # of all of it
    token_seconds: float
    tokens: int  # of the answer
    peaks: Peaks
    use: dict[str, float]  # the part of a token's time in which the accelerator, the host and the link up are busy

    @property
    def seconds(self) -> float:
        """Of the whole request."""
        return self.prompt_seconds + self.tokens * self.token_seconds


def split_routed(work: NodeWork) -> NodeWork:
    """The same with routed experts in segments of their own, behind what stands beside them in a block."""

    def parts(segment: SegmentWork) -> Iterator[SegmentWork]:
        routed = segment.weights * segment.routed // max(1, segment.nbytes)
        if segment.nbytes > segment.routed:
            beside = segment.nbytes - segment.routed
            yield replace(segment, nbytes=beside, weights=segment.weights - routed, routed=0)
        if segment.routed:
            yield replace(segment, nbytes=segment.routed, weights=routed)

    return replace(work, segments=tuple(part for segment in work.segments for part in parts(segment)))


def best_demand(problem: Problem, experts: ExpertWork, hit_rate: HitRate) -> DemandForecast | None:
    """The fastest way of `problem`, whose routed experts are segments of their own; None if there is none.

    There is none without exactly one accelerator, or where that does not hold as many as a token uses of a block, and
    where the host's memory does not hold all of them.
    """
    if len(problem.machine.cards) != 1 or problem.limits.weights or problem.limits.decode == "accelerator":
        return None
    ways = (_forecast(problem, experts, hit_rate, offload) for offload in _ways(problem))
    return min((way for way in ways if way), key=lambda way: way.seconds, default=None)


def _ways(problem: Problem) -> Iterator[Offload]:
    routed = [segment.routed > 0 for segment in problem.work.segments]
    tiers: tuple[Tier, ...] = tuple("ram" if each else "gpu" for each in routed)
    here: tuple[Place, ...] = tuple("host" if each else "accelerator" for each in routed)
    there: tuple[Place, ...] = tuple("accelerator" for _ in routed)
    asked = {"host": [here], "accelerator": [there], None: [here, there]}[problem.limits.prompt]
    for kv in KV_TIERS if problem.limits.kv is None else (problem.limits.kv,):
        for prompt in asked:
            yield Offload(tiers, prompt, here, kv, "performance")


def _forecast(problem: Problem, experts: ExpertWork, hit_rate: HitRate, offload: Offload) -> DemandForecast | None:
    (card,) = problem.machine.cards
    taken = peaks(problem.work, offload, problem.request, problem.needs, problem.chunk)
    slots = max(0, card.memory - taken.accelerator.total - PAGE) // max(1, experts.slot_bytes)
    slots = min(slots, experts.units)
    if slots < experts.used or taken.host.total > problem.machine.memory:
        return None
    found = hit_rate(slots)
    block = _block(problem, experts, found)
    ahead = forecast(_of_prompts(problem, offload, slots / experts.units), offload)
    others = _others(problem, offload, problem.step("decode")[0])
    token = experts.blocks * block.seconds + others
    there = replace(taken.accelerator, slots=taken.accelerator.slots + slots * experts.slot_bytes)
    busy = {"accelerator": others, "host": problem.machine.host.seconds(problem.work.head.nbytes, 0.0), "up": 0.0}
    return DemandForecast(
        offload=offload,
        slots=slots,
        hit_rate=found,
        fetched=block.fetched,
        computed_here=1 - found - block.fetched,
        prompt=ahead.prompt,
        prompt_seconds=ahead.ttft,
        token_seconds=token,
        tokens=problem.request.answer,
        peaks=replace(taken, accelerator=there),
        use={lane: min(1.0, (seconds + experts.blocks * block.busy[lane]) / token) for lane, seconds in busy.items()},
    )


def demand_pays_until(problem: Problem, experts: ExpertWork, way: DemandForecast) -> int:
    """The smallest step, in tokens, that is faster as prompts are computed; `NEVER` if none is."""
    context = problem.step("decode")[0].context
    cyclic = replace(way.offload, decode=way.offload.prompt)

    def pays(tokens: int) -> bool:
        step = StepSize(tokens, 1, max(context, tokens))
        on_demand = experts.blocks * _block_of(problem, experts, way, tokens)
        return step_seconds(problem, cyclic, step) < on_demand + _others(problem, way.offload, step)

    return first_from(pays) or NEVER


def _of_prompts(problem: Problem, offload: Offload, there: float) -> Problem:
    """Where the host computes a prompt's experts, the share that is `there` is computed there meanwhile."""
    if offload.prompt != offload.decode:
        return problem
    here = tuple(_scaled(segment, 1 - there) if segment.routed else segment for segment in problem.work.segments)
    return replace(problem, work=replace(problem.work, segments=here))


def _scaled(segment: SegmentWork, by: float) -> SegmentWork:
    nbytes, routed, weights = (max(1, round(by * each)) for each in (segment.nbytes, segment.routed, segment.weights))
    return replace(segment, nbytes=nbytes, routed=routed, weights=weights)


@dataclass(frozen=True)
class _BlockForecast:
    """The experts of one block for a token: seconds, the share of the wanted that is fetched, seconds by lane."""

    seconds: float
    fetched: float
    busy: dict[str, float]


def _block(problem: Problem, experts: ExpertWork, found: float) -> _BlockForecast:
    """Each of the wanted is there with the same probability, whatever the others are."""
    costs, used = _costs(problem, experts), experts.used
    one_there, one_here = (costs.computing(rates, 1) for rates in (costs.there, costs.host))
    seconds = fetched = 0.0
    for there in range(used + 1):
        likely = comb(used, there) * found**there * (1 - found) ** (used - there)
        division = divide(costs, [1.0] * there, [1.0] * (used - there))
        seconds += likely * division.seconds
        fetched += likely * division.fetched
    busy = {
        "accelerator": costs.before + costs.there.start + (used * found + fetched) * one_there,
        "host": (used * (1 - found) - fetched) * one_here,
        "up": fetched * costs.copying,
    }
    return _BlockForecast(seconds, fetched / used, busy)


def _block_of(problem: Problem, experts: ExpertWork, way: DemandForecast, tokens: int) -> float:
    """Seconds of the experts of one block for several tokens, which choose at random.

    No more are fetched than a block's share of the slots holds: others of them would be gone when they are wanted.
    """
    wanted = max(1, round(experts.experts * (1 - (1 - experts.used / experts.experts) ** tokens)))
    share = way.slots // experts.blocks
    each, there = tokens * experts.used / wanted, min(share, round(way.hit_rate * wanted))
    absent = [each] * (wanted - there)
    return divide(_costs(problem, experts, tokens), [each] * there, absent, share - there).seconds


def _costs(problem: Problem, experts: ExpertWork, tokens: int = 1) -> ExpertCosts:
    hidden = tokens * problem.work.crossing
    return ExpertCosts.of(problem.machine, experts.nbytes, experts.weights, hidden, experts.shared)


def _others(problem: Problem, offload: Offload, step: StepSize) -> float:
    """Seconds of the blocks without routed experts in a step: they are the accelerator's."""
    segments = problem.work.segments
    routed = {segment.block for segment in segments if segment.routed}
    others = [number for number, segment in enumerate(segments) if segment.block not in routed]
    work = replace(problem.work, segments=tuple(segments[number] for number in others))
    places = tuple(offload.decode[number] for number in others)
    alone = replace(
        offload, residence=tuple(offload.residence[number] for number in others), prompt=places, decode=places
    )
    return step_seconds(replace(problem, work=work), alone, step)
