"""Which of a node's weights come when they are wanted: its experts, where all else stays and not all of them fit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scheduler.budget import Budget
from scheduler.demand.choice.cliff import GUARDED
from scheduler.demand.choice.replay import Recording
from scheduler.demand.choice.select import Selected, of_experts, select
from scheduler.demand.policies import Key
from scheduler.demand.sources import DiskUnits
from scheduler.storage.disk import Disk
from scheduler.storage.extent import Extent
from tpi.pack.routing import heard
from tpi.partition import Range, by_expert
from worker.plan.node_plan import NodeBlock, NodePlan
from worker.plan.segments import NodeSegment
from worker.shards.image import HeldBlock

_ALONE = 32 << 10  # bytes: smaller slices of experts are those of small models, whose memory is for slots


@dataclass(frozen=True)
class DemandPlan:
    """`units` come when they are wanted, into so many slots; `always` stay: what every step needs, in order of use."""

    always: tuple[NodeSegment, ...]
    units: dict[Key, NodeSegment]
    slots: int
    memory_bytes: int  # of the slots
    staging_bytes: int  # of all readers
    routing: bytes = b""  # that was recorded of the model

    def select(self, keys: Sequence[Key]) -> Selected:
        """The policy that keeps most of what the model was recorded to use, in so many slots."""
        recording = recording_of(self.routing, keys)
        return Selected(GUARDED) if recording is None else select(recording, self.slots)

    def source(self, held: Sequence[HeldBlock], disk: Disk) -> DiskUnits:
        """The units as they are on disk."""
        return DiskUnits(disk, _extents(self.units, held), _ALONE)


def decide_demand(plan: NodePlan, held: Sequence[HeldBlock], budget: Budget, disk: Disk) -> DemandPlan | None:
    """What is fetched on demand where `budget` would have weights stream in a cycle; None: nothing is.

    That is so where a model has no experts, where what is no expert does not fit, or not one block's worth of experts
    beside it, and where the paper's window was asked for.
    """
    mixture = plan.config.mixture
    if mixture is None or plan.options.window or not budget.placement.streamed_bytes:
        return None
    always = tuple(always_of(block) for block in plan.blocks)
    units = dict(routed_of(plan, mixture.experts))
    source = DiskUnits(disk, _extents(units, held), _ALONE)
    staging = disk.threads * source.staging_bytes
    room = budget.total - budget.used + budget.placement.memory_bytes - staging
    room -= sum(segment.extent(held).slot_bytes for segment in always)
    slots = min(len(units), max(0, room) // max(1, source.slot_bytes))
    if slots < mixture.used:
        return None
    return DemandPlan(always, units, slots, slots * source.slot_bytes, staging, plan.routing)


def recording_of(routing: bytes, keys: Sequence[Key]) -> Recording | None:
    """What the model was recorded to use of the experts `keys`; None: nothing, or a record of other layers."""
    blocks = list(dict.fromkeys(block for block, _ in keys))
    if not routing:
        return None
    experts = heard(routing)
    if experts.shape[1] != len(blocks):  # a node of a stage, or of another model's record
        return None
    return of_experts(experts, blocks, keys)


def always_of(block: NodeBlock) -> NodeSegment:
    """A dense block, or the shared experts of another, if it has any."""
    if block.kind != "experts":
        return NodeSegment(block, block.runs)
    shared = [run for run in block.runs if run.name == "shared"]
    last = block.runs[-1]
    return NodeSegment(block, (*shared, last.cut(Range(last.units.first, last.units.first))))


def routed_of(plan: NodePlan, experts: int) -> Iterator[tuple[Key, NodeSegment]]:
    """This node's units of each routed expert."""
    for block in plan.blocks:
        for run in block.runs if block.kind == "experts" else ():
            if run.name == "neuron":
                for expert, part in by_expert(run.units, run.layout.units // experts):
                    yield (block.number, expert), NodeSegment(block, (run.cut(part),))


def _extents(units: dict[Key, NodeSegment], held: Sequence[HeldBlock]) -> dict[Key, Extent]:
    return {key: segment.extent(held) for key, segment in units.items()}
