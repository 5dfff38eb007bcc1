"""What of a node's weights stays in memory and what streams from its disk: decided once, before anything is loaded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from scheduler.budget import Budget, sufficient_budget
from scheduler.model.placement import Placement
from scheduler.model.ring import EMPTY
from scheduler.storage.disk import DirectDisk, Disk
from scheduler.storage.extent import Extent
from scheduler.storage.tune import DiskSpeed, disk_for, doubt
from tpi.config import default_cache
from tpi.errors import PlanError
from tpi.kernels import Kernels
from tpi.pack.layout import BlockKind
from worker.plan.fit import Tables, fit, need
from worker.plan.node_plan import NodePlan
from worker.plan.segments import NodeSegment, join, on_devices, tiles, whole_blocks
from worker.plan.speeds import speeds_of
from worker.shards.image import HeldBlock


@dataclass(frozen=True)
class Residence:
    """The segments of a node in order of use, and what is done with each."""

    segments: tuple[NodeSegment, ...]
    extents: tuple[Extent, ...]  # of each segment
    placement: Placement  # of the segments
    budget: Budget  # its own placement is of the tiles, before neighbours that stay were joined
    disk: Disk
    memory_for: Callable[[int], int]  # what `--memory` leaves so many bytes for weights
    speed: DiskSpeed = field(default_factory=DiskSpeed)  # what the placement relies on; unmeasured if nothing streams

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(segment.nbytes for segment in self.segments)

    @property
    def placed(self) -> bool:
        """Whether every segment stays in the memory of one of several devices; else the host's window has them all."""
        return any(segment.device for segment in self.segments)

    @property
    def kinds(self) -> tuple[BlockKind, ...]:
        """Of each block, in order of use."""
        return tuple({segment.block.number: segment.block.kind for segment in self.segments}.values())

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
) -> Residence:
    """Where each of the plan's weights lives; `held` are its blocks by their source.

    If anything streams, the speeds of this machine are measured (with `kernels`), unless `disk` is given, which is then
    read. With `shares`, of the host and each of the node's other devices, every block is dealt over them and stays.

    Raises:
        PlanError: if the node's memory does not hold what the plan asks for.
    """
    if len(shares) > 1:
        return _placed(plan, held, on_devices(plan, shares), tables, disk)
    pieces = tiles(plan)
    sizes = [piece.extent(held).slot_bytes for piece in pieces]
    budget, speed = _budget(plan, tables, [piece.extent(held) for piece in pieces], None if disk else kernels)
    segments, placement = _settled(plan, pieces, budget.placement, held)
    extents = tuple(segment.extent(held) for segment in segments)
    return Residence(
        segments=tuple(segments),
        extents=extents,
        placement=placement,
        budget=budget,
        disk=disk or speed.open(_smallest(extents)),
        memory_for=partial(sufficient_budget, need(plan, tables, sizes), chunk=plan.options.prefill_tokens),
        speed=speed,
    )


def _budget(
    plan: NodePlan, tables: Tables | None, extents: Sequence[Extent], kernels: Kernels | None
) -> tuple[Budget, DiskSpeed]:
    """What fits, and how to read the disk; if something streams from it, speeds are measured (with `kernels`)."""
    sizes = [extent.slot_bytes for extent in extents]
    budget = fit(plan, tables, sizes)
    if kernels is None or not budget.placement.streamed_bytes:
        return budget, DiskSpeed()
    disk = disk_for(sorted({extent.path for extent in extents}), default_cache())
    if disk.bytes_per_second:
        budget = fit(plan, tables, sizes, speeds_of(plan, disk, _smallest(extents), budget.used, kernels))
    return budget, disk


def _placed(
    plan: NodePlan,
    held: Sequence[HeldBlock],
    segments: Sequence[NodeSegment],
    tables: Tables | None,
    disk: Disk | None,
) -> Residence:
    """Segments that stay on their devices; the host's share must fit into its memory beside everything else."""
    sizes = [segment.most_bytes(plan.rank) for segment in segments if not segment.device]
    budget = fit(plan, tables, sizes)
    if budget.placement.streamed_bytes:
        least = -(-sufficient_budget(need(plan, tables, sizes), sum(sizes), plan.options.prefill_tokens) >> 20)
        raise PlanError(f"the host's share of the weights does not fit; --memory {least}MiB would do")
    return Residence(
        segments=tuple(segments),
        extents=(),
        placement=Placement((), frozenset(), EMPTY),
        budget=budget,
        disk=disk or DirectDisk(),
        memory_for=partial(sufficient_budget, need(plan, tables, sizes), chunk=plan.options.prefill_tokens),
    )


def _settled(
    plan: NodePlan, pieces: Sequence[NodeSegment], placement: Placement, held: Sequence[HeldBlock]
) -> tuple[list[NodeSegment], Placement]:
    """Neighbours that stay are one segment; where everything stays, each block is."""
    if not placement.streamed_bytes:
        segments = whole_blocks(plan)
        sizes = tuple(segment.extent(held).slot_bytes for segment in segments)
        return segments, Placement(sizes, frozenset(range(len(sizes))), placement.ring)
    segments, numbers = join(pieces, placement.resident)
    return segments, placement.renumbered(numbers, [segment.extent(held).slot_bytes for segment in segments])


def _smallest(extents: Sequence[Extent]) -> int:
    """Bytes of the smallest segment that there is anything of."""
    return min((extent.slot_bytes for extent in extents if extent.nbytes), default=1 << 30)
