"""The input of the choice of a node's plan, `Case`: its part of the model, its machine and the options.

Each mode of running the model (`worker.plan.modes`) proposes one `Candidate`. The fastest becomes the plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Generic, Literal, TypeVar

from scheduler.budget import Budget
from scheduler.model.machine import NodeMachine
from scheduler.model.offload.memory import Needs
from scheduler.model.offload.problem import Limits, Problem
from scheduler.model.offload.work import NodeWork, Place, SegmentWork, TableWork, Workload
from scheduler.model.placement import Placement
from scheduler.model.sizes import TILE
from scheduler.storage.disk import Disk
from scheduler.storage.tune import DiskSpeed, disk_for
from tpi.config import default_cache
from tpi.devices.options import OffloadOptions
from tpi.devices.pages import PAGE, round_up
from tpi.errors import PlanError
from tpi.kernels import Kernels
from tpi.kernels.kv import page_bytes, vector_bytes
from tpi.kernels.spec import PAGE_TOKENS
from worker.node_plan import LayerHeads, NodePlan, RunUnits
from worker.plan.fit import HostShare, Tables, fit, kernel_room, need
from worker.plan.offload import OffloadPlan, piece_bytes
from worker.plan.segments import NodeSegment, cut_pieces, join, tiles
from worker.plan.speeds import speeds_of
from worker.shards.image import HeldBlock

Details = TypeVar("Details", covariant=True)
Mode = Literal["stream", "offload", "experts", "neurons", "batch"]
"""The name of a mode: a module of `worker.plan.modes`, which describes it."""

_VALUE = 4  # bytes of an activation
_PAGES_PER_PIECE = 5  # pages of memory to reserve for each piece, for plans that cut pieces further


@dataclass(frozen=True)
class HostWindow:
    """The segments that pass through the host's memory or stay in it.

    Attributes:
        segments: the segments of the window, in order of use.
        placement: which segments are resident, and the ring for the others.
        budget: the division of the node's memory.
        disk: the reader of the weights' files.
        speed: the disk's speed that the placement relies on; unmeasured if nothing is streamed.
        demanded_bytes: bytes of weights that are read on demand and are in no segment.
    """

    segments: tuple[NodeSegment, ...]
    placement: Placement
    budget: Budget
    disk: Disk
    speed: DiskSpeed
    demanded_bytes: int = 0


@dataclass(frozen=True)
class Candidate(Generic[Details]):
    """A way to run a node's part of a model, which fits into the node's memory.

    Attributes:
        mode: the mode that proposes it.
        details: settings that only this mode has, for example its slots or its batch size.
        offload: the plan of the accelerators; None if the node has none, or if `Case.checking` is True.
        window: the host's window on a node without accelerators; None before the weights are on the node.
        seconds: the predicted seconds of the prompt and of the answer of `Case.request`. (0, 0) makes it the fastest.
        remark: a sentence for the user that says why it was chosen; may be empty.
    """

    mode: Mode
    details: Details
    offload: OffloadPlan | None = None
    window: HostWindow | None = None
    seconds: tuple[float, float] = (0.0, 0.0)
    remark: str = ""


@dataclass(frozen=True)
class Case:
    """A node's part of a deployment, its machine, and what the user asked for.

    Attributes:
        plan: the node's part of the deployment.
        machine: the node's speeds and memory; an accelerator's memory is what is free for this plan. None: a host
            alone, whose speeds are measured only if weights are streamed.
        options: how the user wants the accelerators to be used.
        tables: tables and predictors, on the master.
        held: the files of the plan's blocks, by `NodeBlock.source`; None before they are on the node.
        kernels: measure the host's speeds if weights are streamed; None: nothing is measured.
        disk: the reader of the files; None: one that suits the measured disk.
        request: the request whose time the candidates are compared by. None: at most 512 tokens of prompt and 128 of
            answer.
        coarse: the pieces to give to the cost model; None for those of `worker.plan.segments.cut_pieces`.
        checking: True to find out only whether a plan fits. No times are predicted then.
    """

    plan: NodePlan
    machine: NodeMachine | None = None
    options: OffloadOptions = field(default_factory=OffloadOptions)
    tables: Tables | None = None
    held: Sequence[HeldBlock] | None = None
    kernels: Kernels | None = None
    disk: Disk | None = None
    request: Workload | None = None
    coarse: Sequence[NodeSegment] | None = None
    checking: bool = False

    @property
    def accelerated(self) -> NodeMachine | None:
        """The machine if it has an accelerator that can compute this model, else None."""
        if self.machine is None or self.plan.config.host_only:
            return None
        return self.machine if self.machine.cards else None

    @cached_property
    def pieces(self) -> list[NodeSegment]:
        """The pieces of the node's blocks that an accelerator may hold or stream, in order of use."""
        return list(self.coarse) if self.coarse is not None else cut_pieces(self.plan)

    def sizes(self, pieces: Sequence[NodeSegment]) -> list[int]:
        """Return how many bytes of host memory each of `pieces` takes.

        Before the files are on the node, these are upper bounds.
        """
        if self.held is None:
            return [piece.max_bytes(self.plan.rank) for piece in pieces]
        return [piece.extent(self.held).slot_bytes for piece in pieces]

    def host_part(self, offload: OffloadPlan | None) -> tuple[list[NodeSegment], HostShare]:
        """Return the pieces that do not stay on the accelerators of `offload`, and the host memory that they take.

        If `offload` is None, return all pieces of the node.
        """
        if offload is None:
            pieces = tiles(self.plan)
            return pieces, HostShare.of(pieces, self.sizes(pieces))
        pieces = [replace(offload.pieces[number], device=0) for number in offload.host_pieces]
        staged = offload.staged_bytes + offload.shared_bytes
        return pieces, HostShare.of(
            pieces, self.sizes(pieces), len(offload.host_kv_layers), staged, offload.host_kv_heads
        )

    def in_memory(self, offload: OffloadPlan) -> bool:
        """Return True if the host's memory holds all pieces that are not resident on an accelerator."""
        try:
            return not fit(self.plan, self.tables, self.host_part(offload)[1]).placement.streamed_bytes
        except PlanError:
            return False

    @cached_property
    def host_budget(self) -> tuple[Budget, DiskSpeed]:
        """The division of the memory of a host without accelerators, and the speed of its disk.

        Raises:
            PlanError: if the plan does not fit; names the memory that would suffice.
        """
        pieces, hosted = self.host_part(None)
        return self.budget(pieces, hosted)

    def budget(self, pieces: Sequence[NodeSegment], hosted: HostShare) -> tuple[Budget, DiskSpeed]:
        """Return the division of the host's memory, and the speed of its disk.

        If weights are streamed, measure the speeds of the memory and of the disk first.

        Args:
            pieces: the pieces that lie in the host's memory or on its disk, in order of use.
            hosted: the memory that these pieces and the host's KV pages take.

        Raises:
            PlanError: if the plan does not fit; names the memory that would suffice.
        """
        budget = fit(self.plan, self.tables, hosted)
        if self.kernels is None or self.disk is not None or not budget.placement.streamed_bytes:
            return budget, DiskSpeed()
        assert self.held is not None  # speeds are measured on the node
        extents = [piece.extent(self.held) for piece in pieces]
        disk = disk_for(sorted({extent.path for extent in extents}), default_cache())
        if disk.bytes_per_second:
            smallest = min((extent.slot_bytes for extent in extents if extent.nbytes), default=1 << 30)
            speeds = speeds_of(self.plan, disk, smallest, budget.used, self.kernels)
            budget = fit(self.plan, self.tables, hosted, speeds)
        return budget, disk

    def reader(self, pieces: Sequence[NodeSegment], speed: DiskSpeed) -> Disk:
        """Return a reader that suits the sizes of `pieces` on a disk of this `speed`."""
        return self.disk or speed.open(min(filter(None, self.sizes(pieces)), default=1 << 30))

    def window(self, pieces: Sequence[NodeSegment], budget: Budget, speed: DiskSpeed) -> tuple[HostWindow, list[int]]:
        """Return the host's window for `pieces` placed as `budget` says, with resident neighbours joined.

        Also return, for each piece, the index of the segment that contains it.
        """
        segments, numbers = join(pieces, budget.placement.resident)
        placement = budget.placement.renumbered(numbers, self.sizes(segments))
        return HostWindow(tuple(segments), placement, budget, self.reader(segments, speed), speed), numbers

    def problem(self, pieces: Sequence[NodeSegment], reserve: int | None = None) -> Problem:
        """Return the input of the cost model.

        Args:
            pieces: all pieces of the node, in order of use.
            reserve: bytes to leave free on each accelerator because sizes are rounded up to pages of memory. By default
                some pages for each piece, for plans that cut pieces further.
        """
        machine, plan, options = self.machine, self.plan, self.options
        assert machine is not None  # the cost model compares machines
        demand, reserve = need(plan, self.tables), PAGE * _PAGES_PER_PIECE * len(pieces) if reserve is None else reserve
        smaller = machine.with_cards(lambda card: replace(card, memory=max(0, card.memory - reserve)))
        context = plan.options.pages * PAGE_TOKENS
        usual = Workload(min(512, context // 2), min(128, context // 2), 1, context)
        work = NodeWork(
            tuple(_segment_work(plan, piece) for piece in pieces),
            _VALUE * plan.config.hidden,
            head_work(plan, demand.head),
        )
        return Problem(
            work=work,
            machine=replace(smaller, memory=plan.options.memory or machine.memory),
            request=self.request or usual,
            needs=Needs(demand.token, demand.fixed + min(TILE, demand.embedding), kernel_room(plan)),
            limits=Limits(options.weights_tier, options.kv_tier, options.pipeline_kind, *_forced(options)),
            longest=plan.options.prefill_tokens,
            reserve=reserve,
            chains=_chains(plan),
        )

    def rounding_bytes(self, pieces: Sequence[NodeSegment]) -> int:
        """Return the bytes of padding on an accelerator, where experts and KV pages start on pages of memory.

        The cost model does not count this padding.
        """
        plan = self.plan
        weights = sum(piece_bytes(piece) - piece.nbytes for piece in pieces if piece.block.kind == "experts")
        layers = sum(piece.block.kind == "attention" for piece in pieces)
        kv = 2 * plan.kv_heads * vector_bytes(plan.config.head_dim, plan.options.kv_dtype)
        return weights + layers * (layer_pages_bytes(plan) - plan.options.pages * PAGE_TOKENS * kv)


def _chains(plan: NodePlan) -> bool:
    """Return True if an accelerator can compute all blocks of the node as a chain: no sums of nodes are between them.

    It can compute plain attention and dense feed-forward blocks (`tpi.kernels.chain.plain_blocks`).
    """
    config = plan.config
    return (
        len(plan.group) == 1
        and config.mixture is None
        and not (config.query_growth or config.late_head_norms)
        and not (config.parallel or config.per_layer or config.whole_norms or config.attention_clip)
    )


def head_work(plan: NodePlan, nbytes: int) -> TableWork:
    """Return the work of the output head, whose weights take `nbytes` bytes; 0 on a node that does not hold it."""
    return TableWork(nbytes, plan.config.vocab * plan.config.hidden if nbytes else 0)


def layer_pages_bytes(plan: NodePlan, kv_heads: int | None = None) -> int:
    """Return the bytes of one layer's KV pages with `kv_heads` heads, by default all of the node's.

    Keys and values each start on a page of memory.
    """
    heads = plan.kv_heads if kv_heads is None else kv_heads
    half = page_bytes(1, heads, plan.config.head_dim, plan.options.kv_dtype) // 2
    return 2 * round_up(half * plan.options.pages)


def _forced(options: OffloadOptions) -> tuple[Place | None, Place | None]:
    """Return the devices that `--crossover` prescribes for prompts and for single tokens.

    Both are None if the user did not give `--crossover`.
    """
    if options.crossover is None:
        return None, None
    return "accelerator", "accelerator" if options.crossover == 1 else "host"


def _segment_work(plan: NodePlan, piece: NodeSegment) -> SegmentWork:
    """Return the work of one piece for the cost model: its bytes, its weights, and its keys and values.

    The bytes are rounded up to whole pages of memory, except for experts, of which a token uses only a part.
    """
    config, block, kind = plan.config, piece.block, piece.block.half
    weights = sum(_weights(run) for run in piece.runs)
    mixture = config.mixture if block.kind == "experts" else None
    if mixture is not None:
        routed = sum(run.nbytes for run in piece.runs if run.name == "neuron")
        chosen = mixture.used / mixture.experts
        return SegmentWork(block.number, kind, piece.nbytes, weights, routed=routed, chosen=chosen)
    if block.kind != "attention":
        return SegmentWork(block.number, kind, piece_bytes(piece), weights)
    own = plan.layer_heads[block.layer] if block.kind == "attention" else LayerHeads(0, 0, 0)
    kv = 2 * own.kv_heads * vector_bytes(own.head_dim, plan.options.kv_dtype)
    window = config.windows[block.layer] if config.windows else 0
    pair = 4 * own.heads * own.head_dim  # multiply and add, for the score and for the mixed value
    return SegmentWork(block.number, kind, piece_bytes(piece), weights, kv, pair, window=window)


def _weights(run: RunUnits) -> int:
    return len(run.units) * run.layout.width * run.layout.hidden * len(run.layout.parts)
