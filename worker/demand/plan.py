"""The plan to load a node's experts on demand, if its other weights fit in memory but not all experts do."""

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
from tpi.pack.routing import from_bytes
from tpi.partition import Range, by_expert
from worker.plan.node_plan import NodeBlock, NodePlan
from worker.plan.segments import NodeSegment
from worker.shards.image import HeldBlock

_ALONE = 32 << 10  # bytes: expert slices of at least this size are read alone, without staging memory


@dataclass(frozen=True)
class DemandPlan:
    """The plan: `units` are loaded into slots on demand; `always` stay resident, in order of use."""

    always: tuple[NodeSegment, ...]
    units: dict[Key, NodeSegment]
    slots: int
    memory_bytes: int  # memory of the slots
    staging_bytes: int  # staging memory of all readers
    routing: bytes = b""  # recorded routing of the model; empty if there is none

    def select(self, keys: Sequence[Key]) -> Selected:
        """Return the eviction policy that `scheduler.demand.choice.select.select` chooses for the recorded routing."""
        recording = recording_of(self.routing, keys)
        return Selected(GUARDED) if recording is None else select(recording, self.slots)

    def source(self, held: Sequence[HeldBlock], disk: Disk) -> DiskUnits:
        """Return the units as a source that reads them from disk."""
        return DiskUnits(disk, _extents(self.units, held), _ALONE)


def decide_demand(plan: NodePlan, held: Sequence[HeldBlock], budget: Budget, disk: Disk) -> DemandPlan | None:
    """Return the plan to load experts on demand, if weights would otherwise stream in a cycle under `budget`.

    Return None if all weights fit, the model has no experts, or `--window` is given. Also return None if the other
    weights do not fit together with the experts that a token uses in one block.
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
    """Return the recorded routing of the experts `keys`; None if there is none or it is of other layers."""
    blocks = list(dict.fromkeys(block for block, _ in keys))
    if not routing:
        return None
    experts = from_bytes(routing)
    if experts.shape[1] != len(blocks):  # this node has some of the layers, or the record is of another model
        return None
    return of_experts(experts, blocks, keys)


def always_of(block: NodeBlock) -> NodeSegment:
    """Return a dense block whole, or the shared experts of a block of experts (empty if it has none)."""
    if block.kind != "experts":
        return NodeSegment(block, block.runs)
    shared = [run for run in block.runs if run.name == "shared"]
    last = block.runs[-1]
    return NodeSegment(block, (*shared, last.cut(Range(last.units.first, last.units.first))))


def routed_of(plan: NodePlan, experts: int) -> Iterator[tuple[Key, NodeSegment]]:
    """Yield this node's part of each routed expert."""
    for block in plan.blocks:
        for run in block.runs if block.kind == "experts" else ():
            if run.name == "neuron":
                for expert, part in by_expert(run.units, run.layout.units // experts):
                    yield (block.number, expert), NodeSegment(block, (run.cut(part),))


def _extents(units: dict[Key, NodeSegment], held: Sequence[HeldBlock]) -> dict[Key, Extent]:
    return {key: segment.extent(held) for key, segment in units.items()}
