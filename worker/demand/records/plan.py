"""Which of a node's neurons come from disk one by one: all of them, where the weights do not fit into memory.

Predictors and attention are needed for every token and stay. Long steps, and blocks of which too much is active, pass
through the smallest ring as they do without predictors. What is left is slots for records: filled with what is active
most often, and replaced as tokens ask for others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from scheduler.budget import Budget
from scheduler.demand.records.layer import RecordLayer
from scheduler.demand.records.reader import tier_bytes
from scheduler.demand.records.reads import USUAL_GAP, measured_gap
from scheduler.demand.records.table import SLOT_BYTES
from scheduler.model.placement import Placement
from scheduler.model.ring import smallest
from scheduler.storage.disk import DirectDisk, Disk
from scheduler.storage.openfiles import OpenFilesDisk
from scheduler.storage.tune import DiskSpeed
from tpi.partition import FFN_UNIT
from worker.neurons.sent import frequencies_of
from worker.plan.node_plan import NodeBlock, NodePlan
from worker.plan.segments import NodeSegment, cut_units
from worker.shards.image import HeldBlock

_TILES, _LEAST_TILE = 8, 1 << 20  # of a block that passes through the ring; bytes of each
_MOST_READERS = 4  # threads: more of them take Python's lock from the one that computes
_EACH = 1 << 20  # bytes of a layer for each thread that reads it: a small one keeps few of them busy
CHUNK = 64  # tokens of a step at most: a longer one takes memory that slots need
LEAST = 0.5  # of the neurons that a token is expected to activate: with fewer slots nothing of it is found in memory


@dataclass(frozen=True, eq=False)
class RecordPlan:
    """Records of the blocks `layers`, by their number in order of use; the window has `segments` for longer steps."""

    segments: tuple[NodeSegment, ...]
    placement: Placement  # of them: what is no neuron stays
    layers: dict[int, RecordLayer]
    disk: Disk
    readers: int  # threads
    gap: int = USUAL_GAP  # see `scheduler.demand.records.tier.RecordTier`
    least: int = 0
    plain: Placement | None = None  # of the same segments, for the turns without records, if it takes turns

    @property
    def slots_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(layer.nbytes for layer in self.layers.values())

    @property
    def index_bytes(self) -> int:
        """What records take beside their slots: the index, and the readers."""
        return tier_bytes(list(self.layers.values()), self.readers) - self.slots_bytes

    @property
    def extra_bytes(self) -> int:
        """What it all takes at most beside the window as it is at first, and the index where that takes turns."""
        if self.plain is None:
            return self.index_bytes + self.slots_bytes
        return max(0, self.placement.memory_bytes + self.slots_bytes - self.plain.memory_bytes)

    @property
    def first(self) -> Placement:
        """Of the window, at first."""
        return self.plain or self.placement


def decide_records(
    plan: NodePlan, held: Sequence[HeldBlock], budget: Budget, segments: Sequence[NodeSegment], disk: Disk | DiskSpeed
) -> RecordPlan | None:
    """What is read by neurons where `budget` would have `segments` stream in a cycle; None: nothing is.

    `disk` is read, or is one of such a speed: then what a read of it takes to begin is measured.

    That is so where nothing is predicted or some layer is not, where the paper's window was asked for, and where the
    slots that there is room for would not hold what a token needs.
    """
    blocks = [block for block in plan.blocks if block.kind != "attention" and block.nbytes]
    if not budget.placement.streamed_bytes or plan.options.window or not _predicted(plan, blocks):
        return None
    if plan.options.sparsity != "auto":  # which compares with the plain window, in its own tiles
        segments = [part for block in plan.blocks for part in _tiles(block)]
    placement = _placement(segments, [segment.extent(held).slot_bytes for segment in segments])
    frequencies = frequencies_of(plan, held)
    drafts = {block.number: _draft(block, frequencies[block.layer], held) for block in blocks}
    room = budget.total - budget.used + budget.placement.memory_bytes - placement.memory_bytes
    readers = max(1, min(_MOST_READERS, disk.threads, max(layer.extent.nbytes for layer in drafts.values()) // _EACH))
    room -= tier_bytes(list(drafts.values()), readers)
    layers = _with_slots(drafts, room)
    if any(layer.slots < LEAST * layer.frequency.sum() for layer in layers.values()):
        return None
    if not isinstance(disk, DiskSpeed):
        return RecordPlan(tuple(segments), placement, layers, disk, readers)
    direct = DirectDisk(threads=readers)
    gap = measured_gap([layer.extent for layer in layers.values()], direct)
    return RecordPlan(tuple(segments), placement, layers, OpenFilesDisk(direct), readers, gap)


def _predicted(plan: NodePlan, blocks: Sequence[NodeBlock]) -> bool:
    """Whether every neuron of this node is one that can be predicted and read by itself."""
    predicted = {one.layer for one in plan.predictors}
    by_records = all(len(block.runs) == 1 and block.runs[0].layout.layout == "record" for block in blocks)
    return plan.options.sparsity != "off" and bool(blocks) and by_records and predicted >= {b.layer for b in blocks}


def _tiles(block: NodeBlock) -> list[NodeSegment]:
    """A block's neurons in small tiles, as the ring for steps that need all of them is memory that records lack."""
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
    """A layer without slots; what fills its last unit is never active."""
    (run,) = block.runs
    extent = NodeSegment(block, block.runs).extent(held)
    padded = np.pad(frequency, (0, len(run.units) * run.layout.width - len(frequency)))
    return RecordLayer(block.name, extent, run.layout.record_bytes, padded, 0)


def _with_slots(drafts: dict[int, RecordLayer], room: int) -> dict[int, RecordLayer]:
    """Slots in whole units, in proportion to what a token is expected to activate; no more than there are neurons."""
    found, demand = {}, sum(map(_demand, drafts.values()))
    for number in sorted(drafts, key=lambda number: drafts[number].neurons / max(_demand(drafts[number]), 1e-9)):
        draft = drafts[number]  # whoever has room for all comes first, so that others get what it leaves
        each = draft.record_bytes + SLOT_BYTES
        share = max(0.0, room) * _demand(draft) / max(demand, 1e-9)
        slots = min(draft.neurons, int(share / each)) // FFN_UNIT * FFN_UNIT
        found[number] = replace(draft, slots=slots)
        room, demand = room - slots * each, demand - _demand(draft)
    return {number: found[number] for number in drafts}


def _demand(layer: RecordLayer) -> float:
    """Bytes that a token is expected to need."""
    return float(layer.frequency.sum()) * layer.record_bytes
