"""The plan for reading a node's neurons from disk on demand. It is used if the weights do not fit into memory.

Predictors and attention are needed for every token and stay resident. The remaining memory is a small ring and slots.
Blocks of long steps, and blocks of which too many neurons are active, pass through the ring as they do without
predictors. Each slot holds the weights of one neuron, called its record. The slots first hold the most frequently
active neurons, and are replaced as tokens need others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from scheduler.demand.records.layer import SLOT_BYTES, RecordLayer
from scheduler.demand.records.reader import tier_bytes
from scheduler.demand.records.reads import USUAL_GAP, measured_gap
from scheduler.model.placement import Placement
from scheduler.model.ring import smallest
from scheduler.storage.disk import DirectDisk, Disk
from scheduler.storage.openfiles import OpenFilesDisk
from tpi.partition import FFN_UNIT
from worker.node_plan import NodeBlock, NodePlan
from worker.plan.case import Candidate, Case, HostWindow
from worker.plan.predictors import frequencies_of
from worker.plan.segments import NodeSegment, cut_units
from worker.shards.image import HeldBlock

_TILES, _LEAST_TILE = 8, 1 << 20  # most tiles of a block that passes through the ring; least bytes of a tile
_MOST_READERS = 4  # reader threads; more would take Python's global lock from the computing thread
_EACH = 1 << 20  # least bytes of the largest layer for each reader thread; less would not keep it busy
CHUNK = 64  # most tokens of a step; a longer one takes memory that slots need
LEAST = 0.5  # least slots, as a share of the neurons that a token is expected to activate; fewer find nothing


@dataclass(frozen=True, eq=False)
class RecordPlan:
    """The plan of a node that reads single neurons from disk on demand.

    `layers` has the slots of each layer, by block number in order of use. `segments` are the segments of the window,
    which provides whole blocks to longer steps.

    `gap` and `min_read_bytes`, in bytes, are parameters of `scheduler.demand.records.tier.RecordTier`.
    """

    segments: tuple[NodeSegment, ...]
    placement: Placement  # of `segments`, while neurons are read on demand
    layers: dict[int, RecordLayer]
    disk: Disk
    readers: int  # number of reader threads
    gap: int = USUAL_GAP
    min_read_bytes: int = 0
    plain_placement: Placement | None = None  # of the plain window; None if the two ways do not alternate

    @property
    def slots_bytes(self) -> int:
        """Number of bytes of all slots together."""
        return sum(layer.nbytes for layer in self.layers.values())

    @property
    def index_bytes(self) -> int:
        """Bytes that the neurons' index and the readers' buffers take in addition to the slots."""
        return tier_bytes(list(self.layers.values()), self.readers) - self.slots_bytes

    @property
    def extra_bytes(self) -> int:
        """Upper bound of the bytes that the plan takes in addition to those of `first_placement`.

        If reading on demand alternates with the plain window, slots use the window's memory. Then only the excess
        counts, and the index is not included.
        """
        if self.plain_placement is None:
            return self.index_bytes + self.slots_bytes
        return max(0, self.placement.memory_bytes + self.slots_bytes - self.plain_placement.memory_bytes)

    @property
    def first_placement(self) -> Placement:
        """Placement with which the window starts: that of the plain window if the two ways alternate."""
        return self.plain_placement or self.placement


def with_short_steps(plan: NodePlan) -> NodePlan:
    """Return the plan with steps of at most `CHUNK` tokens."""
    return replace(plan, options=replace(plan.options, prefill_tokens=min(plan.options.prefill_tokens, CHUNK)))


def read_by_neuron(case: Case) -> Candidate[RecordPlan] | None:
    """Return the plan for reading neurons on demand, or None if they should stream in a cycle or stay resident.

    The result is None if all weights fit into memory, if a layer has no predictor, if `--sparsity off` or `--window` is
    given, or if the slots would hold less than half of the neurons that a token needs. The latency of a read is
    measured, unless `case.disk` is given.

    Raises:
        PlanError: if the plan does not fit into memory; names the memory that would suffice.
    """
    case = replace(case, plan=with_short_steps(case.plan))
    plan, held, (budget, speed) = case.plan, case.held, case.host_budget
    blocks = [block for block in plan.blocks if block.kind != "attention" and block.nbytes]
    streams = budget.placement.streamed_bytes > 0
    if held is None or not streams or plan.options.window or not _predicted(plan, blocks):
        return None
    whole, hosted = case.host_part(None)
    # auto compares with the plain window, and needs the tiles of that
    plain = plan.options.sparsity == "auto"
    segments = whole if plain else [part for block in plan.blocks for part in _tiles(block)]
    placement = _placement(segments, case.sizes(segments))
    frequencies = frequencies_of(plan, held)
    drafts = {block.number: _draft(block, frequencies[block.layer], held) for block in blocks}
    room = budget.total - budget.used + budget.placement.memory_bytes - placement.memory_bytes
    threads = speed.threads if case.disk is None else case.disk.threads
    readers = max(1, min(_MOST_READERS, threads, max(layer.extent.nbytes for layer in drafts.values()) // _EACH))
    room -= tier_bytes(list(drafts.values()), readers)
    layers = _with_slots(drafts, room)
    if any(layer.slots < LEAST * layer.frequency.sum() for layer in layers.values()):
        return None
    if case.disk is not None:
        found = RecordPlan(tuple(segments), placement, layers, case.disk, readers)
    else:
        direct = DirectDisk(threads=readers)
        gap = measured_gap([layer.extent for layer in layers.values()], direct)
        found = RecordPlan(tuple(segments), placement, layers, OpenFilesDisk(direct), readers, gap)
    if plain:
        budget, _ = case.budget(segments, replace(hosted, staging_bytes=found.index_bytes))
        found = replace(found, plain_placement=budget.placement)
    budget = replace(budget, placement=found.first_placement, demand_bytes=found.extra_bytes)
    window = HostWindow(found.segments, found.first_placement, budget, case.reader(whole, speed), speed)
    return Candidate("neurons", found, window=window)


def _predicted(plan: NodePlan, blocks: Sequence[NodeBlock]) -> bool:
    """Return True if the plan has predictors for all neurons of `blocks`, and each neuron can be read by itself."""
    predicted = {one.layer for one in plan.predictors}
    by_records = all(len(block.runs) == 1 and block.runs[0].layout.layout == "record" for block in blocks)
    return plan.options.sparsity != "off" and bool(blocks) and by_records and predicted >= {b.layer for b in blocks}


def _tiles(block: NodeBlock) -> list[NodeSegment]:
    """Cut a block of neurons into small tiles, because a large ring would leave less memory for slots.

    Attention and empty blocks stay whole.
    """
    if block.kind == "attention" or not block.nbytes:
        return [NodeSegment(block, block.runs)]
    size = max(_LEAST_TILE, block.nbytes // _TILES)
    return [NodeSegment(block, (block.runs[0].cut(part),)) for part in cut_units(block, size)]


def _placement(segments: Sequence[NodeSegment], sizes: Sequence[int]) -> Placement:
    streamed = [
        number for number, segment in enumerate(segments) if segment.block.kind != "attention" and segment.nbytes
    ]
    kept = frozenset(range(len(segments))) - frozenset(streamed)
    return Placement(tuple(sizes), kept, smallest(streamed, sizes, 2))


def _draft(block: NodeBlock, frequency: npt.NDArray[np.float64], held: Sequence[HeldBlock]) -> RecordLayer:
    """Return the description of a layer's neurons with 0 slots; neurons that pad the last unit get the frequency 0."""
    (run,) = block.runs
    extent = NodeSegment(block, block.runs).extent(held)
    padded = np.pad(frequency, (0, len(run.units) * run.layout.width - len(frequency)))
    return RecordLayer(block.name, extent, run.layout.record_bytes, padded, 0)


def _with_slots(drafts: dict[int, RecordLayer], room: int) -> dict[int, RecordLayer]:
    """Return the layers with as many slots, in whole units, as `room` bytes allow.

    Layers get slots in proportion to the bytes that a token is expected to activate, at most one for each neuron.
    """
    found, demand = {}, sum(map(_demand, drafts.values()))
    for number in sorted(drafts, key=lambda number: drafts[number].neurons / max(_demand(drafts[number]), 1e-9)):
        draft = drafts[number]  # layers that need fewer slots than their share come first and leave room to others
        each = draft.record_bytes + SLOT_BYTES
        share = max(0.0, room) * _demand(draft) / max(demand, 1e-9)
        slots = min(draft.neurons, int(share / each)) // FFN_UNIT * FFN_UNIT
        found[number] = replace(draft, slots=slots)
        room, demand = room - slots * each, demand - _demand(draft)
    return {number: found[number] for number in drafts}


def _demand(layer: RecordLayer) -> float:
    """Return the bytes of a layer's neurons that a token is expected to activate."""
    return float(layer.frequency.sum()) * layer.record_bytes
