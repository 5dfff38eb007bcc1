"""The plan for routed experts on demand on a card whose memory cannot hold all of them.

All other weights (attention, norms, routers, shared experts, dense layers) are resident on the card. The rest of its
memory is slots of one expert each, used as a cache. The host's memory holds all routed experts.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache

from scheduler.demand.choice.cliff import GUARDED
from scheduler.demand.choice.replay import Recording, replay
from scheduler.demand.choice.sample import sampled
from scheduler.demand.policies import Key
from scheduler.model.experts.costs import ExpertCosts
from scheduler.model.experts.forecast import DemandForecast, ExpertWork, HitRate, best_demand, demand_pays_until
from scheduler.model.machine import NodeMachine
from scheduler.model.offload.choice import choose
from scheduler.model.offload.problem import Problem
from scheduler.model.placement import Placement
from tpi.devices.options import OffloadOptions
from tpi.devices.pages import PAGE
from tpi.errors import PlanError
from worker.demand.pieces import expert_work, pieces_with_experts
from worker.demand.plan import recording_of, routed_of
from worker.plan.fit import HostShare, Tables, fit
from worker.plan.node_plan import NodePlan
from worker.plan.offload import OffloadPlan, layer_pages_bytes, offload_problem
from worker.plan.segments import NodeSegment, cut_pieces

LONG = 32  # a step of at least so many tokens counts as part of a prompt, if both kinds are computed alike
_MOST = 1 << 22  # MiB of a card's memory, an upper bound for the search
_REPLAYED = 256  # most recorded steps that are replayed for a plan, which is done for many numbers of slots
_USES = 4096  # most uses of blocks in such a replay


@dataclass(frozen=True)
class ExpertPlan(OffloadPlan):
    """A plan with routed experts on demand.

    The host holds all `units` routed experts, the card `slots` slots of `slot_bytes` bytes. There are at least `least`
    slots, the number of experts that a token uses in one block.
    """

    units: int = field(kw_only=True)
    least: int = field(kw_only=True)
    slots: int = field(kw_only=True)
    slot_bytes: int = field(kw_only=True)
    costs: ExpertCosts = field(kw_only=True)
    forecast: DemandForecast = field(kw_only=True)

    @property
    def arena_bytes(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.slot_bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes of the card's memory that the plan takes, with the slots."""
        return super().memory_bytes + self.arena_bytes

    def below(self, sizes: Sequence[int], fitting: Placement) -> Placement:
        """Return the placement of the host's segments in its memory.

        Raises:
            PlanError: if the host's memory does not hold all experts.
        """
        if fitting.streamed_bytes:
            raise PlanError(
                f"experts on demand come from memory, and {-(-fitting.streamed_bytes >> 20)}MiB of them do "
                "not fit; give more --memory, or --pipeline performance"
            )
        return super().below(sizes, fitting)


def decide_experts(
    plan: NodePlan, machine: NodeMachine, options: OffloadOptions, tables: Tables | None = None
) -> ExpertPlan | None:
    """Return a plan with experts on demand if it is predicted to be faster than every other plan; else None.

    With `--pipeline demand`, return it even if it is slower.

    Raises:
        PlanError: if `--pipeline demand` is given, and experts on demand are not possible.
    """
    asked = options.pipeline == "demand"
    found = planned_experts(plan, machine, options, tables) if asked or options.pipeline == "auto" else None
    if asked and found is None:
        raise PlanError(_refusal(plan, machine, options, tables))
    if asked or found is None or found.slots == found.units:
        return found if asked else None
    with suppress(PlanError):  # raised if no other plan fits
        others = choose(offload_problem(plan, cut_pieces(plan), machine, options, tables))
        return found if found.forecast.seconds < others.seconds else None
    return found


def planned_experts(
    plan: NodePlan, machine: NodeMachine, options: OffloadOptions, tables: Tables | None = None
) -> ExpertPlan | None:
    """Return the fastest plan with experts on demand, or None if there is none."""
    work, pieces, mixture = expert_work(plan), tuple(pieces_with_experts(plan)), plan.config.mixture
    if work is None or mixture is None or plan.options.window or machine.shared:
        return None
    problem = offload_problem(plan, pieces, machine, options, tables)
    keys = [key for key, _ in routed_of(plan, mixture.experts)]
    found = best_demand(problem, work, hit_rate_of(plan.routing, keys))
    if found is None:
        return None
    made = _made(plan, problem, pieces, work, found)
    if options.crossover is not None:
        made = replace(made, crossover=options.crossover)
    return _filled(made) if _in_memory(plan, made, tables) else None


def _made(
    plan: NodePlan, problem: Problem, pieces: tuple[NodeSegment, ...], work: ExpertWork, found: DemandForecast
) -> ExpertPlan:
    """Return the plan of a forecast in this node's pieces, still without slots."""
    routed = frozenset(number for number, segment in enumerate(problem.work.segments) if segment.routed)
    long = routed if found.offload.prompt != found.offload.decode else frozenset()
    return ExpertPlan(
        pieces=pieces,
        kept=frozenset(range(len(pieces))) - routed,
        long=long,
        short=frozenset(),
        crossover=demand_pays_until(problem, work, found) if long else LONG,
        kv=found.offload.kv,
        depth=2,
        kv_layer_bytes=layer_pages_bytes(plan),
        problem=problem,
        chosen=found.offload,
        in_ram=True,
        units=work.units,
        slots=0,
        slot_bytes=work.slot_bytes,
        least=work.used,
        costs=ExpertCosts.of(problem.machine, work.nbytes, work.weights, problem.work.crossing, work.shared),
        forecast=found,
    )


def hit_rate_of(routing: bytes, keys: Sequence[Key]) -> HitRate:
    """Return a function from the number of slots to the expected hit rate of the experts `keys`.

    It replays the recorded routing. Without a recording it assumes that all experts are equally likely.
    """
    recording = recording_of(routing, keys)
    if recording is None:
        return lambda slots: min(1.0, slots / max(1, len(keys)))
    first = Recording(recording.blocks, recording.steps[:_REPLAYED])

    @cache
    def found(slots: int) -> float:
        some, room = sampled(first, slots, _USES)
        known = some.of_at_most(room)
        return replay(known, GUARDED.open(known.blocks), room).hit_rate

    return found


def _refusal(plan: NodePlan, machine: NodeMachine, options: OffloadOptions, tables: Tables | None) -> str:
    """Return the message on why experts on demand are not possible, and what to do instead."""

    def with_room(mib: int) -> ExpertPlan | None:
        room = machine.with_cards(lambda card: replace(card, memory=mib << 20))
        return planned_experts(plan, room, options, tables)

    what = "--pipeline demand copies experts from memory to an accelerator on demand"
    if plan.config.mixture is None:
        return f"{what}, and this model has no experts; leave it out"
    if len(machine.cards) > 1:
        return f"{what}, and works with one accelerator only; give --device once"
    if machine.shared:
        return f"{what}, and this accelerator shares its memory with the host, so nothing needs copying; leave it out"
    if options.weights != "auto" or options.crossover == 1 or plan.options.window:
        return f"{what}, and cannot be combined with --weights, --crossover 1 or --window; leave those out"
    if with_room(_MOST) is None:
        return f"{what}, and memory does not hold all of them; give more --memory, or --pipeline performance"
    least, enough = 0, _MOST
    while enough - least > 1:
        middle = (least + enough) // 2
        least, enough = (least, middle) if with_room(middle) else (middle, enough)
    return f"{what}; all other weights must fit on it, and do not: --gpu-memory {enough}MiB would do"


def _filled(made: ExpertPlan) -> ExpertPlan | None:
    """Return the plan with as many slots as fit on the card next to everything else; None if they are too few."""
    room = made.problem.rooms[0] - made.memory_bytes - PAGE
    slots = min(made.units, room // max(1, made.slot_bytes))
    return replace(made, slots=slots) if slots >= made.least else None


def _in_memory(plan: NodePlan, made: ExpertPlan, tables: Tables | None) -> bool:
    """Return True if the host's memory holds all routed experts."""
    fed = [made.pieces[number] for number in made.host_pieces]
    hosted = HostShare.of(fed, [piece.most_bytes(plan.rank) for piece in fed], len(made.home), made.staged_bytes)
    try:
        return not fit(plan, tables, hosted).placement.streamed_bytes
    except PlanError:
        return False
