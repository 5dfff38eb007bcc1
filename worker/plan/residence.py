"""The decision which of a node's weights stay in memory and which are streamed from disk, made before any is loaded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from scheduler.budget import Budget, Demand, budget_with_head, window_budget
from scheduler.model.placement import Placement
from scheduler.model.ring import EMPTY
from scheduler.storage.disk import Disk
from scheduler.storage.extent import Extent
from scheduler.storage.tune import DiskSpeed, disk_for, doubt
from tpi.config import default_cache
from tpi.kernels import Kernels
from tpi.pack.layout import BlockKind
from worker.demand.plan import DemandPlan, decide_demand
from worker.demand.records.plan import CHUNK, RecordPlan, decide_records
from worker.plan.fit import HostShare, Tables, fit, need
from worker.plan.node_plan import NodePlan
from worker.plan.places import Places, on_the_host, through_accelerator
from worker.plan.segments import NodeSegment, join, tiles
from worker.plan.speeds import speeds_of
from worker.shards.image import HeldBlock

if TYPE_CHECKING:
    from worker.plan.offload import OffloadPlan


@dataclass(frozen=True)
class Residence:
    """The segments of a node, and where the weights of each lie.

    Attributes:
        segments: the segments of the host's window, in order of use.
        extents: the place of each of them on disk.
        placement: which of them are resident, and the ring for the others.
        budget: the division of the node's memory. Its placement is of the tiles, before resident neighbours are joined.
        disk: the reader of the weights' files.
        memory_for: takes the bytes of weights to hold in memory; returns the `--memory`, in bytes, that they need
            with the head in memory.
        places: where each block's segments are computed.
        memory_with: takes a `--window` and a `--retain`; returns the `--memory`, in bytes, that they need with the
            head in memory.
        speed: the disk's speed that the placement relies on; unmeasured if nothing is streamed.
        offload: the plan of the accelerators, if the node has any.
        demand: the plan for experts that are read when a step chooses them, if they are.
        records: the plan for neurons that are read when a step chooses them, if they are.
    """

    segments: tuple[NodeSegment, ...]
    extents: tuple[Extent, ...]
    placement: Placement
    budget: Budget
    disk: Disk
    memory_for: Callable[[int], int]
    places: Places
    memory_with: Callable[[int, int], int]
    speed: DiskSpeed = field(default_factory=DiskSpeed)
    offload: "OffloadPlan | None" = None
    demand: DemandPlan | None = None
    records: RecordPlan | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        fetched = sum(segment.nbytes for segment in self.demand.units.values()) if self.demand else 0
        return fetched + sum(place.segment.nbytes for block in self.places.long for place in block)

    @property
    def kinds(self) -> tuple[BlockKind, ...]:
        """The kind of each block, in order of use: "attention" or "ffn", which includes experts."""
        return tuple(block[0].segment.block.half for block in self.places.long)

    def compare(self, nbytes: int, seconds: float) -> None:
        """Compare the disk's measured speed with a run that read `nbytes` bytes in `seconds`.

        If the run contradicts the measurement, the next start measures the disk again.
        """
        if self.speed.contradicted(nbytes, seconds):
            doubt(sorted({extent.path for extent in self.extents}), default_cache())


def decide(
    plan: NodePlan,
    held: Sequence[HeldBlock],
    kernels: Kernels,
    tables: Tables | None = None,
    disk: Disk | None = None,
    offload: "OffloadPlan | None" = None,
) -> Residence:
    """Decide where each of the plan's weights lies.

    Args:
        plan: the node's part of the deployment.
        held: the files of the plan's blocks, by `NodeBlock.source`.
        kernels: measure this machine's speeds if weights are streamed and `disk` is not given.
        tables: tables and predictors, on the master.
        disk: the reader of the weights' files; by default one that suits the measured disk.
        offload: the plan of the node's accelerators, if it has any.

    Raises:
        PlanError: if the plan does not fit into the node's memory.
    """
    pieces = (
        tiles(plan)
        if offload is None
        else [replace(offload.pieces[number], device=0) for number in offload.host_pieces]
    )
    layers = None if offload is None else len(offload.home)
    staged = offload.staged_bytes + offload.shared_bytes if offload is not None else 0
    kv_heads = offload.host_kv_heads if offload is not None else None
    hosted = HostShare.of(pieces, [piece.extent(held).slot_bytes for piece in pieces], layers, staged, kv_heads)
    budget, speed = _budget(plan, tables, hosted, [piece.extent(held) for piece in pieces], None if disk else kernels)
    placement = budget.placement
    reader = disk or speed.open(_smallest([piece.extent(held) for piece in pieces]))
    demand = None if offload is not None else decide_demand(plan, held, budget, reader)
    if demand is not None:
        return _demanded(plan, held, tables, budget, demand, reader, need(plan, tables, hosted), speed)
    if offload is None and plan.predictors:
        by_neurons = _by_neurons(plan, held, None if disk else kernels, tables, hosted, pieces, reader, speed)
        if by_neurons is not None:
            return by_neurons
    if offload is not None:
        placement = offload.below(hosted.sizes, placement)
        offload = offload.over(placement)
    segments, numbers = join(pieces, placement.resident)
    extents = tuple(segment.extent(held) for segment in segments)
    return Residence(
        segments=tuple(segments),
        extents=extents,
        placement=placement.renumbered(numbers, [extent.slot_bytes for extent in extents]),
        budget=replace(budget, placement=placement),
        disk=disk or speed.open(_smallest(extents)),
        memory_for=partial(budget_with_head, need(plan, tables, hosted), chunk=plan.options.prefill_tokens),
        memory_with=partial(memory_with_window, plan, tables),
        places=on_the_host(segments) if offload is None else through_accelerator(offload, segments, numbers),
        speed=speed,
        offload=offload,
    )


def memory_with_window(plan: NodePlan, tables: Tables | None, window: int, retain: int) -> int:
    """Return the `--memory`, in bytes, that the paper's window and retention need with the head in memory."""
    asked = replace(plan, options=replace(plan.options, window=window, retain=retain))
    return window_budget(need(asked, tables), window, retain, plan.options.prefill_tokens)


def _demanded(
    plan: NodePlan,
    held: Sequence[HeldBlock],
    tables: Tables | None,
    budget: Budget,
    demand: DemandPlan,
    disk: Disk,
    needed: Demand,
    speed: DiskSpeed,
) -> Residence:
    """Return a residence where the weights that every step needs are resident, and experts are read when chosen."""
    extents = tuple(segment.extent(held) for segment in demand.always)
    sizes = tuple(extent.slot_bytes for extent in extents)
    placement = Placement(sizes, frozenset(range(len(sizes))), EMPTY)
    return Residence(
        segments=demand.always,
        extents=extents,
        placement=placement,
        budget=replace(budget, placement=placement, demand_bytes=demand.memory_bytes + demand.staging_bytes),
        disk=disk,
        memory_for=partial(budget_with_head, needed, chunk=plan.options.prefill_tokens),
        memory_with=partial(memory_with_window, plan, tables),
        places=on_the_host(demand.always),
        speed=speed,
        demand=demand,
    )


def _by_neurons(
    plan: NodePlan,
    held: Sequence[HeldBlock],
    kernels: Kernels | None,
    tables: Tables | None,
    hosted: HostShare,
    pieces: Sequence[NodeSegment],
    disk: Disk,
    speed: DiskSpeed,
) -> Residence | None:
    """Return a residence whose neurons are read when chosen, or None if that is not possible.

    Attention is resident. Short steps read single neurons; long steps stream all of them through the window.
    Without `kernels`, weights are read from `disk`, and nothing is measured.
    """
    plan = replace(plan, options=replace(plan.options, prefill_tokens=min(plan.options.prefill_tokens, CHUNK)))
    budget, needed = fit(plan, tables, hosted), need(plan, tables, hosted)
    records = decide_records(plan, held, budget, pieces, disk if kernels is None else speed)
    if records is None:
        return None
    if plan.options.sparsity == "auto":
        beside = replace(hosted, staged=records.index_bytes)
        budget, _ = _budget(plan, tables, beside, [piece.extent(held) for piece in pieces], kernels)
        records = replace(records, plain=budget.placement)
    return Residence(
        segments=records.segments,
        extents=tuple(segment.extent(held) for segment in records.segments),
        placement=records.first,
        budget=replace(budget, placement=records.first, demand_bytes=records.extra_bytes),
        disk=disk,
        memory_for=partial(budget_with_head, needed, chunk=plan.options.prefill_tokens),
        memory_with=partial(memory_with_window, plan, tables),
        places=on_the_host(records.segments),
        speed=speed,
        records=records,
    )


def _budget(
    plan: NodePlan, tables: Tables | None, hosted: HostShare, extents: Sequence[Extent], kernels: Kernels | None
) -> tuple[Budget, DiskSpeed]:
    """Return how the node's memory is divided, and the disk's speed.

    Speeds are measured, with `kernels`, if weights must be streamed. Without `kernels` nothing is measured.
    """
    budget = fit(plan, tables, hosted)
    if kernels is None or not budget.placement.streamed_bytes:
        return budget, DiskSpeed()
    disk = disk_for(sorted({extent.path for extent in extents}), default_cache())
    if disk.bytes_per_second:
        budget = fit(plan, tables, hosted, speeds_of(plan, disk, _smallest(extents), budget.used, kernels))
    return budget, disk


def _smallest(extents: Sequence[Extent]) -> int:
    """Return the bytes of the smallest segment that is not empty; 1 GiB if there is none."""
    return min((extent.slot_bytes for extent in extents if extent.nbytes), default=1 << 30)
