"""The place of each of a node's weights, as a candidate says: in memory, on an accelerator, or streamed."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from scheduler.budget import Budget, budget_with_head, window_budget
from scheduler.model.placement import Placement
from scheduler.storage.disk import Disk
from scheduler.storage.extent import Extent
from scheduler.storage.tune import DiskSpeed, mark_doubted
from tpi.config import default_cache
from tpi.pack.layout import BlockKind
from worker.node_plan import NodePlan
from worker.plan.case import Candidate, Case, HostWindow, Mode
from worker.plan.fit import Tables, need
from worker.plan.offload import OffloadPlan
from worker.plan.places import Places, on_the_host, through_accelerator
from worker.plan.segments import NodeSegment


@dataclass(frozen=True)
class Residence:
    """The segments of a node, and where the weights of each lie.

    Attributes:
        segments: the segments of the host's window, in order of use.
        extents: the byte range of each segment on disk.
        placement: which segments are resident, and the ring for the others.
        budget: the division of the node's memory. Its placement counts tiles, before resident neighbours are joined.
        disk: the reader of the weights' files.
        memory_for: takes the bytes of weights to hold in memory; returns the `--memory`, in bytes, that they need
            with the head in memory.
        places: where each block's segments are computed.
        memory_with: takes a `--window` and a `--retain`; returns the `--memory`, in bytes, that they need with the
            head in memory.
        mode: the mode in which the node runs.
        details: settings that only this mode has (`Candidate.details`).
        nbytes: bytes of all weights.
        speed: the disk's speed that the placement relies on; unmeasured if nothing is streamed.
        offload: the plan of the accelerators, if the node has any.
        remark: a sentence for the user that says why this was chosen; may be empty.
    """

    segments: tuple[NodeSegment, ...]
    extents: tuple[Extent, ...]
    placement: Placement
    budget: Budget
    disk: Disk
    memory_for: Callable[[int], int]
    places: Places
    memory_with: Callable[[int, int], int]
    mode: Mode
    details: Any
    nbytes: int
    speed: DiskSpeed = field(default_factory=DiskSpeed)
    offload: OffloadPlan | None = None
    remark: str = ""

    @property
    def kinds(self) -> tuple[BlockKind, ...]:
        """The kind of each block, in order of use: "attention" or "ffn", which includes experts."""
        return tuple(block[0].block.half for block in self.places.long)

    def check_disk_speed(self, nbytes: int, seconds: float) -> None:
        """Compare the disk's measured speed with a run that read `nbytes` bytes in `seconds`.

        If the run contradicts the measurement, the next start measures the disk again.
        """
        if self.speed.contradicted_by(nbytes, seconds):
            mark_doubted(sorted({extent.path for extent in self.extents}), default_cache())


def residence_of(case: Case, chosen: Candidate[Any]) -> Residence:
    """Return where the weights of a node lie if it runs the candidate `chosen`.

    Raises:
        PlanError: if the pieces that are not on accelerators do not fit into the node's memory.
    """
    offload, window = chosen.offload, chosen.window
    hosted = case.host_part(offload)[1]
    places = on_the_host(window.segments) if window is not None else None
    if offload is not None:
        window, offload, places = _with_host_window(case, offload)
    assert window is not None  # a candidate without accelerators has the host's window
    assert places is not None
    assert case.held is not None  # the files are on the node
    of_all = sum(segment.nbytes for block in places.long for segment in block)
    return Residence(
        segments=window.segments,
        extents=tuple(segment.extent(case.held) for segment in window.segments),
        placement=window.placement,
        budget=window.budget,
        disk=window.disk,
        memory_for=partial(
            budget_with_head, need(case.plan, case.tables, hosted), chunk=case.plan.options.prefill_tokens
        ),
        memory_with=partial(memory_with_window, case.plan, case.tables),
        places=places,
        mode=chosen.mode,
        details=chosen.details,
        nbytes=window.demanded_bytes + of_all,
        speed=window.speed,
        offload=offload,
        remark=chosen.remark,
    )


def memory_with_window(plan: NodePlan, tables: Tables | None, window: int, retain: int) -> int:
    """Return the `--memory`, in bytes, that a node needs with `--window` and `--retain`, and with the head in memory.

    The window has `window` blocks, and one of every `retain` FFN blocks is resident.
    """
    asked = replace(plan, options=replace(plan.options, window=window, retain=retain))
    return window_budget(need(asked, tables), window, retain, plan.options.prefill_tokens)


def _with_host_window(case: Case, offload: OffloadPlan) -> tuple[HostWindow, OffloadPlan, Places]:
    """Return the host's window for the pieces that are not on accelerators, the adapted `offload`, and all places.

    Raises:
        PlanError: if these pieces do not fit into the node's memory.
    """
    pieces, hosted = case.host_part(offload)
    budget, speed = case.budget(pieces, hosted)
    placement = offload.host_placement(hosted.sizes, budget.placement)
    offload = offload.adapted_to(placement)
    window, numbers = case.window(pieces, replace(budget, placement=placement), speed)
    return window, offload, through_accelerator(offload, window.segments, numbers)
