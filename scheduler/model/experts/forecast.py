"""The forecast of a node that copies experts to an accelerator on demand, and the best such configuration.

All other weights are resident on the accelerator. The memory that is left determines the number of slots for experts,
and the slots determine the hit rate. The seconds of a token follow from the hit rate and from the number of fetched
experts. For a prompt, the node streams experts to the accelerator in a cycle or computes them on the host;
`scheduler.model.offload` forecasts that part.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import comb

from scheduler.model.experts.costs import ExpertCosts, divide
from scheduler.model.offload.crossover import NEVER, first_from
from scheduler.model.offload.forecast import PhaseForecast, forecast, step_seconds
from scheduler.model.offload.memory import Peaks, peaks
from scheduler.model.offload.problem import Problem
from scheduler.model.offload.work import KV_TIERS, Offload, Place, SegmentWork, StepSize, Tier
from tpi.devices.pages import PAGE, round_up

HitRate = Callable[[int], float]
"""Function from a number of slots to the expected share of wanted experts that are in them, 0 to 1."""


@dataclass(frozen=True)
class ExpertWork:
    """The routed experts of a node: `blocks` blocks with `experts` experts each, of which a token uses `used`.

    `nbytes` and `weights` count one expert's slice; `shared` is the bytes of a block's shared experts.
    """

    blocks: int
    experts: int
    used: int
    nbytes: int
    weights: int
    shared: int = 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of the accelerator's memory that one expert takes."""
        return round_up(self.nbytes)

    @property
    def units(self) -> int:
        """Number of experts in all blocks."""
        return self.blocks * self.experts


@dataclass(frozen=True)
class DemandForecast:
    """The forecast for `slots` expert slots on the accelerator, all other weights placed as in `offload`.

    Of the experts that tokens want, the share `hit_rate` is on the accelerator, `fetched` is copied there, and
    `computed_on_host` is computed on the host; the three add up to 1.
    """

    offload: Offload
    slots: int
    hit_rate: float
    fetched: float
    computed_on_host: float
    prompt: PhaseForecast
    prompt_seconds: float  # of all prompts
    token_seconds: float
    tokens: int  # tokens of the answer
    peaks: Peaks
    use: dict[str, float]  # the shares of a token's time that the accelerator, the host and the uplink are busy

    @property
    def seconds(self) -> float:
        """Seconds of the whole request."""
        return self.prompt_seconds + self.tokens * self.token_seconds


def best_demand(problem: Problem, experts: ExpertWork, hit_rate: HitRate) -> DemandForecast | None:
    """Return the fastest configuration for `problem`, or None if none fits.

    The routed experts of the problem must be segments of their own. A configuration needs exactly one
    accelerator, with slots for as many experts as a token uses in a block. The RAM must hold all experts. Return None
    also if the limits fix where weights are, or require the accelerator to decode.

    Args:
        problem: the work, and the machine to place it on.
        experts: the routed experts.
        hit_rate: takes a number of slots; returns the expected share of wanted experts that are in them.
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
    ahead = forecast(_prompt_problem(problem, offload, slots / experts.units), offload)
    others = _other_seconds(problem, offload, problem.step("decode")[0])
    token = experts.blocks * block.seconds + others
    there = replace(taken.accelerator, slots=taken.accelerator.slots + slots * experts.slot_bytes)
    busy = {"accelerator": others, "host": problem.machine.host.seconds(problem.work.head.nbytes, 0.0), "up": 0.0}
    return DemandForecast(
        offload=offload,
        slots=slots,
        hit_rate=found,
        fetched=block.fetched,
        computed_on_host=1 - found - block.fetched,
        prompt=ahead.prompt,
        prompt_seconds=ahead.ttft,
        token_seconds=token,
        tokens=problem.request.answer,
        peaks=replace(taken, accelerator=there),
        use={lane: min(1.0, (seconds + experts.blocks * block.busy[lane]) / token) for lane, seconds in busy.items()},
    )


def demand_pays_until(problem: Problem, experts: ExpertWork, way: DemandForecast) -> int:
    """Return the fewest tokens of a step from which computing it like a prompt is faster than copying experts on
    demand.

    Return `NEVER` if copying on demand is always faster. `way` is the configuration that copies on demand.
    """
    context = problem.step("decode")[0].context
    cyclic = replace(way.offload, decode=way.offload.prompt)

    def pays(tokens: int) -> bool:
        step = StepSize(tokens, 1, max(context, tokens))
        on_demand = experts.blocks * _block_of(problem, experts, way, tokens)
        return step_seconds(problem, cyclic, step) < on_demand + _other_seconds(problem, way.offload, step)

    return first_from(pays) or NEVER


def _prompt_problem(problem: Problem, offload: Offload, there: float) -> Problem:
    """Return the problem of computing a prompt with the configuration `offload`.

    If the host computes the prompt's experts, leave out the share `there` of them, which is on the accelerator: the
    accelerator computes these experts at the same time.
    """
    if offload.prompt != offload.decode:
        return problem
    here = tuple(_scaled(segment, 1 - there) if segment.routed else segment for segment in problem.work.segments)
    return replace(problem, work=replace(problem.work, segments=here))


def _scaled(segment: SegmentWork, by: float) -> SegmentWork:
    nbytes, routed, weights = (max(1, round(by * each)) for each in (segment.nbytes, segment.routed, segment.weights))
    return replace(segment, nbytes=nbytes, routed=routed, weights=weights)


@dataclass(frozen=True)
class _BlockForecast:
    """The forecast of a block's experts for one token.

    `seconds` is the time of the block, `busy` the seconds that each lane is busy, and `fetched` the share of the wanted
    experts that are copied to the accelerator.
    """

    seconds: float
    fetched: float
    busy: dict[str, float]


def _block(problem: Problem, experts: ExpertWork, found: float) -> _BlockForecast:
    """Return the mean forecast of a block in which each wanted expert is on the accelerator with probability `found`.

    The experts are assumed to be there independently of each other.
    """
    costs, used = _costs(problem, experts), experts.used
    one_there, one_here = (costs.computing(rates, 1) for rates in (costs.accelerator, costs.host))
    seconds = fetched = 0.0
    for there in range(used + 1):
        likely = comb(used, there) * found**there * (1 - found) ** (used - there)
        division = divide(costs, [1.0] * there, [1.0] * (used - there))
        seconds += likely * division.seconds
        fetched += likely * division.fetched
    busy = {
        "accelerator": costs.before + costs.accelerator.start + (used * found + fetched) * one_there,
        "host": (used * (1 - found) - fetched) * one_here,
        "up": fetched * costs.copying,
    }
    return _BlockForecast(seconds, fetched / used, busy)


def _block_of(problem: Problem, experts: ExpertWork, way: DemandForecast, tokens: int) -> float:
    """Return the seconds for the experts of one block in a step of `tokens` tokens that choose experts at random.

    At most as many experts are copied as the block's share of the slots holds. More would evict experts before they are
    used.
    """
    wanted = max(1, round(experts.experts * (1 - (1 - experts.used / experts.experts) ** tokens)))
    share = way.slots // experts.blocks
    each, there = tokens * experts.used / wanted, min(share, round(way.hit_rate * wanted))
    absent = [each] * (wanted - there)
    return divide(_costs(problem, experts, tokens), [each] * there, absent, share - there).seconds


def _costs(problem: Problem, experts: ExpertWork, tokens: int = 1) -> ExpertCosts:
    hidden = tokens * problem.work.crossing
    return ExpertCosts.of(problem.machine, experts.nbytes, experts.weights, hidden, experts.shared)


def _other_seconds(problem: Problem, offload: Offload, step: StepSize) -> float:
    """Return the seconds of a step for the blocks without routed experts, which the accelerator computes."""
    segments = problem.work.segments
    routed = {segment.block for segment in segments if segment.routed}
    others = [number for number, segment in enumerate(segments) if segment.block not in routed]
    work = replace(problem.work, segments=tuple(segments[number] for number in others))
    places = tuple(offload.decode[number] for number in others)
    alone = replace(
        offload, residence=tuple(offload.residence[number] for number in others), prompt=places, decode=places
    )
    return step_seconds(replace(problem, work=work), alone, step)
