"""What of a node's weights stays in memory and what streams from its disk: decided once, before anything is loaded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from scheduler.budget import Budget, Demand, headed_budget, sufficient_budget, window_budget
from scheduler.model.placement import Placement
from scheduler.model.ring import EMPTY
from scheduler.storage.disk import DirectDisk, Disk
from scheduler.storage.extent import Extent
from scheduler.storage.tune import DiskSpeed, disk_for, doubt
from tpi.config import default_cache
from tpi.errors import PlanError
from tpi.kernels import Kernels
from tpi.pack.layout import BlockKind
from worker.demand.plan import DemandPlan, decide_demand
from worker.demand.records.plan import CHUNK, RecordPlan, decide_records
from worker.plan.fit import Hosted, Tables, fit, need
from worker.plan.node_plan import NodePlan
from worker.plan.places import Places, on_the_host, staying, through_accelerator
from worker.plan.segments import NodeSegment, join, on_devices, tiles
from worker.plan.speeds import speeds_of
from worker.shards.image import HeldBlock

if TYPE_CHECKING:
    from worker.plan.offload import OffloadPlan


@dataclass(frozen=True)
class Residence:
    """The segments of a node in order of use, and what is done with each."""

    segments: tuple[NodeSegment, ...]  # the host's window has these
    extents: tuple[Extent, ...]  # of each of them
    placement: Placement  # of them
    budget: Budget  # its own placement is of the tiles, before neighbours that stay were joined
    disk: Disk
    memory_for: Callable[[int], int]  # what `--memory` leaves so many bytes for weights, and keeps the head in memory
    places: Places  # where every block's segments are computed
    memory_with: Callable[[int, int], int]  # what `--memory` a `--window` needs with a `--retain`, likewise
    speed: DiskSpeed = field(default_factory=DiskSpeed)  # what the placement relies on; unmeasured if nothing streams
    offload: "OffloadPlan | None" = None  # what an accelerator does, where there is one
    demand: DemandPlan | None = None  # what comes when it is wanted
    records: RecordPlan | None = None  # neurons that do

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        fetched = sum(segment.nbytes for segment in self.demand.units.values()) if self.demand else 0
        return fetched + sum(place.segment.nbytes for block in self.places.long for place in block)

    @property
    def kinds(self) -> tuple[BlockKind, ...]:
        """Of each block, in order of use."""
        return tuple(block[0].segment.block.half for block in self.places.long)

    def compare(self, nbytes: int, seconds: float) -> None:
        """Have the disk measured again by the next start if this run, which read so much in so long, contradicts it."""
        if self.speed.contradicted(nbytes, seconds):
            doubt(sorted({extent.path for extent in self.extents}), default_cache())


def decide(
    plan: NodePlan,
    held: Sequence[HeldBlock],
    kernels: Kernels,
    tables: Tables | None = None,
    disk: Disk | None = None,
    shares: Sequence[float] = (),
    offload: "OffloadPlan | None" = None,
) -> Residence:
    """Where each of the plan's weights lives; `held` are its blocks by their source.

    If anything streams, the speeds of this machine are measured (with `kernels`), unless `disk` is given, which is then
    read. With `shares`, of the host and each of the node's other devices, every block is dealt over them and stays.
    `offload` says what an accelerator does instead.

    Raises:
        PlanError: if the node's memory does not hold what the plan asks for.
    """
    if len(shares) > 1:
        return _dealt(plan, on_devices(plan, shares), tables, disk)
    pieces = tiles(plan) if offload is None else [replace(offload.pieces[number], device=0) for number in offload.fed]
    layers = None if offload is None else len(offload.home)
    staged = offload.staged_bytes + offload.shared_bytes if offload is not None else 0
    kv_heads = offload.home_heads if offload is not None else None
    hosted = Hosted.of(pieces, [piece.extent(held).slot_bytes for piece in pieces], layers, staged, kv_heads)
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
        memory_for=partial(headed_budget, need(plan, tables, hosted), chunk=plan.options.prefill_tokens),
        memory_with=partial(memory_with_window, plan, tables),
        places=on_the_host(segments) if offload is None else through_accelerator(offload, segments, numbers),
        speed=speed,
        offload=offload,
    )


def memory_with_window(plan: NodePlan, tables: Tables | None, window: int, retain: int) -> int:
    """Return the `--memory`, in bytes, with which the paper's window runs beside a head in memory."""
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
    """What every step needs stays; experts come when they are wanted."""
    extents = tuple(segment.extent(held) for segment in demand.always)
    sizes = tuple(extent.slot_bytes for extent in extents)
    placement = Placement(sizes, frozenset(range(len(sizes))), EMPTY)
    return Residence(
        segments=demand.always,
        extents=extents,
        placement=placement,
        budget=replace(budget, placement=placement, demand_bytes=demand.memory_bytes + demand.staging_bytes),
        disk=disk,
        memory_for=partial(headed_budget, needed, chunk=plan.options.prefill_tokens),
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
    hosted: Hosted,
    pieces: Sequence[NodeSegment],
    disk: Disk,
    speed: DiskSpeed,
) -> Residence | None:
    """Attention stays; neurons are read one by one for short steps, and pass through the window for long ones.

    None where that cannot be. Without `kernels` it is `disk` that is read, and nothing is measured.
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
        memory_for=partial(headed_budget, needed, chunk=plan.options.prefill_tokens),
        memory_with=partial(memory_with_window, plan, tables),
        places=on_the_host(records.segments),
        speed=speed,
        records=records,
    )


def _budget(
    plan: NodePlan, tables: Tables | None, hosted: Hosted, extents: Sequence[Extent], kernels: Kernels | None
) -> tuple[Budget, DiskSpeed]:
    """What fits, and how to read the disk; if something streams from it, speeds are measured (with `kernels`)."""
    budget = fit(plan, tables, hosted)
    if kernels is None or not budget.placement.streamed_bytes:
        return budget, DiskSpeed()
    disk = disk_for(sorted({extent.path for extent in extents}), default_cache())
    if disk.bytes_per_second:
        budget = fit(plan, tables, hosted, speeds_of(plan, disk, _smallest(extents), budget.used, kernels))
    return budget, disk


def _dealt(plan: NodePlan, segments: Sequence[NodeSegment], tables: Tables | None, disk: Disk | None) -> Residence:
    """Segments that stay on their devices; the host's share must fit into its memory beside everything else."""
    own = [segment for segment in segments if not segment.device]
    hosted = Hosted.of(own, [segment.most_bytes(plan.rank) for segment in own])
    budget, needed = fit(plan, tables, hosted), need(plan, tables, hosted)
    if budget.placement.streamed_bytes:
        least = -(-sufficient_budget(needed, sum(hosted.sizes), plan.options.prefill_tokens) >> 20)
        raise PlanError(f"the host's share of the weights does not fit; --memory {least}MiB would do")
    return Residence(
        segments=(),
        extents=(),
        placement=Placement((), frozenset(), EMPTY),
        budget=budget,
        disk=disk or DirectDisk(),
        memory_for=partial(headed_budget, needed, chunk=plan.options.prefill_tokens),
        memory_with=partial(memory_with_window, plan, tables),
        places=staying(segments),
    )


def _smallest(extents: Sequence[Extent]) -> int:
    """Bytes of the smallest segment that there is anything of."""
    return min((extent.slot_bytes for extent in extents if extent.nbytes), default=1 << 30)
