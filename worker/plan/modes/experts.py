"""The mode that loads routed experts when tokens choose them. It is for experts that do not all fit into memory.

With an accelerator, all other weights (attention, norms, routers, shared experts, dense layers) are resident on it. The
rest of its memory is slots of one expert each, used as a cache. The host's memory holds all routed experts.

Without one, all other weights are resident in the host's memory. The rest of it is slots, filled from disk.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from scheduler.demand.choice.cliff import DEFAULT_POLICY
from scheduler.demand.choice.replay import Recording, replay
from scheduler.demand.choice.sample import sample_layers
from scheduler.demand.choice.select import SelectedPolicy, recording_of_experts, select
from scheduler.demand.policies import Key
from scheduler.demand.sources import DiskUnits
from scheduler.model.experts.costs import ExpertCosts
from scheduler.model.experts.forecast import DemandForecast, ExpertWork, HitRate, best_demand, demand_pays_until
from scheduler.model.offload.problem import Problem
from scheduler.model.placement import Placement
from scheduler.model.ring import EMPTY
from tpi.devices.pages import PAGE
from tpi.errors import PlanError
from tpi.pack.routing import from_bytes
from tpi.partition import Range, by_expert
from worker.node_plan import NodeBlock, NodePlan
from worker.plan.case import Candidate, Case, HostWindow, layer_pages_bytes
from worker.plan.offload import MemoryRule, OffloadPlan
from worker.plan.segments import NodeSegment

LONG = 32  # a step of at least so many tokens counts as long, if long and short steps are computed in the same way
_MOST = 1 << 22  # MiB; where the search for a sufficient --gpu-memory ends
_REPLAYED = 256  # most recorded steps in a replay; a plan needs one replay for each number of slots that it considers
_USES = 4096  # most uses of blocks in a replay
_ALONE = 32 << 10  # bytes: expert slices of at least this size are read alone, without staging memory
_IN_RAM = MemoryRule(
    True, "experts on demand come from memory", "give more --memory, or --pipeline performance"
)  # the host's memory holds all experts


@dataclass(frozen=True)
class CardSlots:
    """Slots for experts on a card: `slots` of `slot_bytes` bytes for `expert_count` experts.

    There are at least `min_slots` slots, the number of experts that a token uses in one block.
    """

    expert_count: int
    min_slots: int
    slots: int
    slot_bytes: int
    costs: ExpertCosts
    forecast: DemandForecast

    @property
    def arena_bytes(self) -> int:
        """Number of bytes of all slots together."""
        return self.slots * self.slot_bytes


@dataclass(frozen=True)
class HostSlots:
    """Slots for experts in the host's memory: `units` are loaded into the slots on demand.

    `resident` lists the other weights, which always stay in memory, in order of use. `source` reads the units from
    their files.
    """

    resident: tuple[NodeSegment, ...]
    units: dict[Key, NodeSegment]
    slots: int
    source: DiskUnits
    routing: bytes = b""  # recorded routing of the model; empty if there is none

    def select(self, keys: Sequence[Key]) -> SelectedPolicy:
        """Return the eviction policy that `scheduler.demand.choice.select.select` chooses for the recorded routing."""
        recording = recording_of(self.routing, keys)
        return SelectedPolicy(DEFAULT_POLICY) if recording is None else select(recording, self.slots)


def propose(case: Case) -> Candidate[CardSlots] | Candidate[HostSlots] | None:
    """Return the fastest plan that loads experts on demand, or None if no such plan fits.

    None is also returned if the slots hold all experts, unless `--pipeline demand` is given.

    Raises:
        PlanError: if `--pipeline demand` is given, and experts on demand are not possible.
    """
    if case.accelerated is None:
        return _from_disk(case)
    asked = case.options.pipeline == "demand"
    found = from_memory(case)
    if found is None and asked:
        raise PlanError(_refusal(case))
    if found is None or (found.details.slots == found.details.expert_count and not asked):
        return None
    return found


def from_memory(case: Case) -> Candidate[CardSlots] | None:
    """Return the fastest plan that copies experts from memory to the card on demand, or None if no such plan fits."""
    plan, pieces = case.plan, tuple(split_pieces(case.pieces))
    work = expert_work(plan)
    assert case.machine is not None  # it has an accelerator
    if work is None or plan.options.window or case.machine.shared:
        return None
    problem = case.problem(pieces)
    found = best_demand(problem, work, hit_rate_of(plan.routing, list(dict(routed_experts(plan)))))
    if found is None:
        return None
    offload, details = _made(case, problem, pieces, work, found)
    if not case.in_memory(offload):
        return None
    room = problem.free_bytes[0] - offload.memory_bytes - PAGE
    details = replace(details, slots=min(details.expert_count, room // max(1, details.slot_bytes)))
    if details.slots < details.min_slots:
        return None
    offload = replace(offload, other_bytes=details.arena_bytes)
    return Candidate("experts", details, offload, seconds=(found.prompt_seconds, found.tokens * found.token_seconds))


def _made(
    case: Case, problem: Problem, pieces: tuple[NodeSegment, ...], work: ExpertWork, found: DemandForecast
) -> tuple[OffloadPlan, CardSlots]:
    """Return the plan in which only `pieces` without routed experts are resident, and its settings with 0 slots.

    Args:
        case: the node to plan for.
        problem: the input of the cost model.
        pieces: all pieces of the node, with routed experts in pieces of their own.
        work: the routed experts, for the cost model.
        found: the cost model's choice.
    """
    routed = frozenset(number for number, segment in enumerate(problem.work.segments) if segment.routed)
    long = routed if found.offload.prompt != found.offload.decode else frozenset()
    crossover = demand_pays_until(problem, work, found) if long else LONG
    offload = OffloadPlan(
        pieces=pieces,
        resident=frozenset(range(len(pieces))) - routed,
        long=long,
        short=frozenset(),
        crossover=crossover if case.options.crossover is None else case.options.crossover,
        kv=found.offload.kv,
        depth=2,
        kv_layer_bytes=layer_pages_bytes(case.plan),
        problem=problem,
        chosen=found.offload,
        longest=problem.tokens,
        memory=_IN_RAM,
    )
    costs = ExpertCosts.of(problem.machine, work.nbytes, work.weights, problem.work.crossing, work.shared)
    return offload, CardSlots(work.units, work.used, 0, work.slot_bytes, costs, found)


def hit_rate_of(routing: bytes, keys: Sequence[Key]) -> HitRate:
    """Return a function from the number of slots to the expected hit rate of the experts `keys`.

    The function replays the recorded routing. Without a recording it assumes that all experts are equally likely.
    """
    recording = recording_of(routing, keys)
    if recording is None:
        return lambda slots: min(1.0, slots / max(1, len(keys)))
    first = Recording(recording.blocks, recording.steps[:_REPLAYED])

    @cache
    def found(slots: int) -> float:
        some, room = sample_layers(first, slots, _USES)
        known = some.of_at_most(room)
        return replay(known, DEFAULT_POLICY.open(known.blocks), room).hit_rate

    return found


def _refusal(case: Case) -> str:
    """Return the error message for `--pipeline demand`: the reason why it is not possible, and what to do."""
    plan, machine, options = case.plan, case.machine, case.options
    assert machine is not None  # it has an accelerator

    def with_room(mib: int) -> Candidate[CardSlots] | None:
        return from_memory(replace(case, machine=machine.with_cards(lambda card: replace(card, memory=mib << 20))))

    what = "--pipeline demand copies experts from memory to an accelerator on demand"
    if plan.config.mixture is None:
        return f"{what}, and this model has no experts; leave it out"
    if len(machine.cards) > 1:
        return f"{what}, and a node does so with one accelerator; start one worker for each card"
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


def _from_disk(case: Case) -> Candidate[HostSlots] | None:
    """Return a plan that loads experts from disk on demand, if weights would otherwise be streamed in a cycle.

    Return None if all weights fit, the model has no experts, or `--window` is given. Also return None if the other
    weights do not fit together with the experts that a token uses in one block.
    """
    plan, mixture, held = case.plan, case.plan.config.mixture, case.held
    if mixture is None or plan.options.window or held is None:
        return None
    budget, speed = case.host_budget
    if not budget.placement.streamed_bytes:
        return None
    disk = case.reader(case.host_part(None)[0], speed)
    always = tuple(resident_part(block) for block in plan.blocks)
    units = dict(routed_experts(plan))
    source = DiskUnits(disk, {key: unit.extent(held) for key, unit in units.items()}, _ALONE)
    staging = disk.threads * source.staging_bytes
    room = budget.total - budget.used + budget.placement.memory_bytes - staging
    room -= sum(segment.extent(held).slot_bytes for segment in always)
    slots = min(len(units), max(0, room) // max(1, source.slot_bytes))
    if slots < mixture.used:
        return None
    found = HostSlots(always, units, slots, source, plan.routing)
    placement = Placement(tuple(case.sizes(always)), frozenset(range(len(always))), EMPTY)
    budget = replace(budget, placement=placement, demand_bytes=slots * source.slot_bytes + staging)
    demanded = sum(unit.nbytes for unit in units.values())
    return Candidate("experts", found, window=HostWindow(always, placement, budget, disk, speed, demanded))


def recording_of(routing: bytes, keys: Sequence[Key]) -> Recording | None:
    """Return the recorded routing of the experts `keys`; None if there is none or it is of other layers."""
    blocks = list(dict.fromkeys(block for block, _ in keys))
    if not routing:
        return None
    experts = from_bytes(routing)
    if experts.shape[1] != len(blocks):  # this node has some of the layers, or the record is of another model
        return None
    return recording_of_experts(experts, blocks, keys)


def resident_part(block: NodeBlock) -> NodeSegment:
    """Return the part of a block that is always resident: all of a dense block, or the shared experts.

    The result is an empty segment for a block of experts without shared ones.
    """
    if block.kind != "experts":
        return NodeSegment(block, block.runs)
    shared = [run for run in block.runs if run.name == "shared"]
    last = block.runs[-1]
    return NodeSegment(block, (*shared, last.cut(Range(last.units.first, last.units.first))))


def routed_experts(plan: NodePlan) -> Iterator[tuple[Key, NodeSegment]]:
    """Yield this node's part of each routed expert."""
    mixture = plan.config.mixture
    for block in plan.blocks:
        for run in block.runs if block.kind == "experts" and mixture else ():
            if run.name == "neuron" and mixture:
                for expert, part in by_expert(run.units, run.layout.units // mixture.experts):
                    yield (block.number, expert), NodeSegment(block, (run.cut(part),))


def expert_work(plan: NodePlan) -> ExpertWork | None:
    """Describe the node's routed experts for the cost model; return None if it has none."""
    mixture = plan.config.mixture
    sizes = [segment for _, segment in routed_experts(plan)]
    if mixture is None or not sizes:
        return None
    largest = max(sizes, key=lambda segment: segment.nbytes)
    (run,) = largest.runs
    blocks = [block for block in plan.blocks if block.kind == "experts"]
    own = -(-len(sizes) // len(blocks))
    shared = max(sum(run.nbytes for run in block.runs if run.name == "shared") for block in blocks)
    return ExpertWork(
        blocks=len(blocks),
        experts=own,
        used=max(1, round(mixture.used * own / mixture.experts)),
        nbytes=largest.nbytes,
        weights=len(run.units) * run.layout.width * run.layout.hidden * len(run.layout.parts),
        shared=shared,
    )


def split_pieces(pieces: Sequence[NodeSegment]) -> Iterator[NodeSegment]:
    """Yield all pieces in order of use, assigned to the card; routed and shared experts get different pieces."""
    block = None
    for piece in pieces:
        routed = tuple(run for run in piece.runs if run.name == "neuron")
        begins, block = piece.block is not block, piece.block
        if block.kind != "experts":
            yield replace(piece, device=1)
            continue
        if begins and block.runs[0].name == "shared":
            yield replace(resident_part(block), device=1)
        if routed:
            yield NodeSegment(block, routed, 1)
