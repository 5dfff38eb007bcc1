"""The plan of a node with accelerators: resident pieces, streamed pieces, and KV pages (PIPO, section 3.5).

Resident pieces stay in an accelerator's memory and are always computed there. The others lie in the host's memory or
on its disk. A step either streams them to the accelerator, one after the other, or computes them on the host. Long
and short steps may differ in this. `scheduler.model.offload` chooses by predicted time; this module turns its choice
into the pieces, the rings and the pages of one node.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import le

from scheduler.model.machine import NodeMachine
from scheduler.model.offload.choice import choose
from scheduler.model.offload.crossover import turning_point
from scheduler.model.offload.fitting import feasible, refusal
from scheduler.model.offload.memory import Needs
from scheduler.model.offload.problem import Limits, Problem
from scheduler.model.offload.work import KvTier, NodeWork, Offload, Place, SegmentWork, TableWork, Workload
from scheduler.model.placement import Placement
from scheduler.model.ring import Ring, smallest
from scheduler.transfer.merged import merged
from tpi.config import ModelConfig
from tpi.devices.arena import cuts_between
from tpi.devices.options import OffloadOptions
from tpi.devices.pages import PAGE, round_up
from tpi.errors import PlanError
from tpi.kernels.spec import PAGE_TOKENS
from tpi.kv import page_bytes, vector_bytes
from worker.plan.fit import Tables, kernel_room, need
from worker.plan.node_plan import NodePlan, RunUnits
from worker.plan.segments import NodeSegment, cut_pieces

_DEPTH = {"performance": 2, "memory": 1}  # segments in the ring at once; as many layers' KV pages visit at once
_DEEPEST = 4  # the most segments in a ring: more would not even out the sizes any further
_VALUE = 4  # bytes of an activation
_PAGES_PER_PIECE = 5  # pages of memory to reserve for each piece, for plans that cut pieces further
Numbers = frozenset[int]


@dataclass(frozen=True)
class OffloadPlan:
    """The division of a node's work between the host and its accelerators.

    Pieces are all of the node's pieces in order of use; numbers are indices of them. Each piece is assigned to the
    accelerator `piece.device`: it is resident there, is streamed through that accelerator's ring, or is computed by
    the host instead. A layer's keys and values lie on the accelerator of its attention, or in the host's memory.
    """

    pieces: tuple[NodeSegment, ...]
    kept: Numbers  # pieces that are resident on their accelerator
    long: Numbers  # other pieces that steps of at least `crossover` tokens stream to the accelerator
    short: Numbers  # other pieces that shorter steps stream to the accelerator
    crossover: int  # tokens
    kv: KvTier
    depth: int  # segments in a ring at once, and layers whose KV pages visit the accelerator at once
    kv_layer_bytes: int  # bytes of one layer's KV pages
    problem: Problem  # the input of the cost model
    chosen: Offload  # the choice of the cost model
    ahead: int = 0  # segments in a ring at once, if more than `depth`
    in_ram: bool | None = None  # True: the others are all in memory; False: all on disk; None: in memory while they fit
    remark: str = ""  # why this plan was chosen, for the user

    @property
    def longest(self) -> int:
        """The number of tokens of the longest step that fits on the accelerators."""
        return self.problem.tokens

    @property
    def gathers(self) -> bool:
        """True if one call computes all experts of a block, even if they lie in several places."""
        return False

    def named(self, piece: int) -> str:
        """Return the name of a streamed piece in traces and errors."""
        return self.pieces[piece].block.name

    @property
    def host_pieces(self) -> list[int]:
        """The numbers of the pieces that lie in the host's memory or on its disk, in order of use."""
        return [number for number in range(len(self.pieces)) if number not in self.kept]

    @property
    def streamed_pieces(self) -> list[int]:
        """The numbers of the pieces that long or short steps stream through a ring, in order of use."""
        return sorted(self.long | self.short)

    @property
    def cards(self) -> range:
        """The numbers of the accelerators among the node's devices, from 1 on."""
        return range(1, 1 + max((piece.device for piece in self.pieces), default=1))

    def on(self, card: int) -> Numbers:
        """Return the numbers of the pieces that are assigned to accelerator `card`."""
        return frozenset(number for number, piece in enumerate(self.pieces) if piece.device == card)

    def ring(self, numbers: Numbers) -> Ring:
        """Return a ring for the pieces `numbers`, merged from one per accelerator; its blocks are piece numbers."""
        sizes = [_size(piece) for piece in self.pieces]
        depth = self.ahead or self.depth
        return merged([smallest(sorted(numbers & self.on(card)), sizes, depth) for card in self.cards], sizes)

    def ring_bytes(self, card: int) -> int:
        """Return the bytes of accelerator `card`'s ring: long and short steps use the same memory in turn."""
        return max(self.ring(streamed & self.on(card)).size for streamed in (self.long, self.short))

    def ring_cuts(self, card: int) -> list[int]:
        """Return the offsets in accelerator `card`'s ring at which no piece of long or short steps is cut in two."""
        mine = self.on(card)
        rings = [self.ring(streamed & pieces) for streamed in (self.long, self.short) for pieces in (mine, streamed)]
        return cuts_between(
            (offset, offset + _size(self.pieces[piece]))
            for ring in rings
            for piece, offset in zip(ring.blocks, ring.offsets, strict=True)
            if piece in mine
        )

    def deepened(self, rooms: Sequence[int]) -> "OffloadPlan":
        """Return the plan with the deepest rings that fit; a deeper ring hides differences between pieces' sizes.

        Args:
            rooms: bytes of memory on each accelerator.
        """
        if self.depth == 1 or not self.streamed_pieces:
            return self
        deeper = (replace(self, ahead=ahead) for ahead in range(_DEEPEST, self.depth, -1))
        return next((plan for plan in deeper if all(map(le, plan.card_bytes, rooms))), self)

    @property
    def layers(self) -> list[int]:
        """The numbers of the layers with attention, in order of use."""
        return list(dict.fromkeys(piece.block.layer for piece in self.pieces if piece.block.kind == "attention"))

    def layers_on(self, card: int) -> list[int]:
        """Return the layers whose attention, and so their keys and values, are assigned to accelerator `card`."""
        mine = {self.pieces[number].block.layer for number in self.on(card) if self._attends(number)}
        return [layer for layer in self.layers if layer in mine]

    @property
    def staged(self) -> list[int]:
        """The layers whose attention an accelerator computes while their keys and values lie in the host's memory."""
        computed = self.kept | self.long | self.short
        attending = {self.pieces[number].block.layer for number in computed if self._attends(number)}
        return [layer for layer in self.layers if layer in attending] if self.kv == "ram" else []

    def staged_on(self, card: int) -> list[int]:
        """Return those layers of `staged` that are assigned to accelerator `card`."""
        mine = set(self.layers_on(card))
        return [layer for layer in self.staged if layer in mine]

    def stages(self, card: int) -> int:
        """Return the number of layers whose KV pages visit accelerator `card` at once."""
        return min(self.depth, len(self.staged_on(card)))

    @property
    def staged_bytes(self) -> int:
        """Bytes of host memory that collect keys and values on their way to or from the accelerator."""
        return 0

    @property
    def host_kv_heads(self) -> int | None:
        """The number of KV heads per layer with keys and values in the host's memory; None means all."""
        return None

    @property
    def home(self) -> list[int]:
        """The layers whose keys and values lie in the host's memory."""
        return self.layers if self.kv == "ram" else []

    @property
    def memory_bytes(self) -> int:
        """Bytes of accelerator memory that the plan takes in all, without the buffers of kernels."""
        return sum(self.card_bytes)

    @property
    def shared_bytes(self) -> int:
        """Bytes of host memory that accelerators without memory of their own take, including kernels' buffers."""
        cards = self.problem.machine.cards
        buffers = self.problem.needs.there.nbytes(self.problem.tokens)
        taken = [(card, size) for card, size in zip(cards, self.card_bytes, strict=False) if card.shared and size]
        return sum(size + buffers for _, size in taken)

    @property
    def card_bytes(self) -> list[int]:
        """Bytes that the plan takes on each accelerator, without the buffers of kernels."""
        return [self._bytes_on(card) for card in self.cards]

    def _bytes_on(self, card: int) -> int:
        kept = sum(_size(self.pieces[number]) for number in self.kept & self.on(card))
        layers = len(self.layers_on(card)) if self.kv == "gpu" else self.stages(card)
        return kept + self.ring_bytes(card) + layers * self.kv_layer_bytes

    def below(self, sizes: Sequence[int], fitting: Placement) -> Placement:
        """Return the placement of the pieces `host_pieces` in the host's memory, as `in_ram` says.

        Args:
            sizes: bytes of each of these pieces.
            fitting: the placement that keeps as many of them resident as fit.

        Raises:
            PlanError: if all must be in memory and do not fit.
        """
        if self.in_ram and fitting.streamed_bytes:
            short = -(-fitting.streamed_bytes >> 20)
            raise PlanError(
                f"--weights ram needs all weights in memory, but {short}MiB of them do not fit; use --weights auto"
            )
        if self.in_ram is not False or not sizes:
            return fitting
        rings = [smallest(range(len(sizes)), sizes, depth) for depth in (2, 1)]
        ring = next((ring for ring in rings if ring.size <= fitting.memory_bytes), rings[-1])
        return Placement(tuple(sizes), frozenset(), ring)

    def over(self, below: Placement) -> "OffloadPlan":
        """Return the plan adapted to `below`, the placement of the pieces `host_pieces` in the host's memory.

        If some of them are read from disk, a step that streams any pieces to the accelerator must stream all of them.
        The reason is that the disk is read in a fixed order.
        """
        if not below.streamed_bytes:
            return self
        every = frozenset(self.host_pieces)
        return replace(self, long=every if self.long else self.long, short=every if self.short else self.short)

    def _attends(self, number: int) -> bool:
        return self.pieces[number].block.kind == "attention"


def check_offload(plan: NodePlan, machine: NodeMachine, options: OffloadOptions, tables: Tables | None = None) -> None:
    """Check that a plan fits into `machine` in a way that `options` allow, before any weight moves.

    Raises:
        PlanError: if nothing fits; names the smallest setting that would suffice.
    """
    pieces = cut_pieces(plan)
    problem = offload_problem(plan, pieces, machine, options, tables, _rounding(plan, pieces))
    if not feasible(problem):
        raise PlanError(refusal(problem))


def decide_offload(
    plan: NodePlan, machine: NodeMachine, options: OffloadOptions, tables: Tables | None = None
) -> OffloadPlan:
    """Choose which pieces are resident on the accelerators of `machine`, and which steps stream the others to them.

    Args:
        plan: the node's part of the deployment.
        machine: the node's speeds and memory. An accelerator's memory is what is free for this plan.
        options: the user's choices, which restrict the plan.
        tables: tables and predictors, on the master.

    Raises:
        PlanError: if the options do not allow a plan that fits; names the smallest setting that would suffice.
    """
    cut = cut_pieces(plan)
    problem = offload_problem(plan, cut, machine, options, tables, _rounding(plan, cut))
    chosen = choose(problem).offload
    problem = replace(problem, cards=chosen.cards)
    dealt = chosen.cards or (0,) * len(cut)
    pieces = tuple(replace(piece, device=1 + card) for piece, card in zip(cut, dealt, strict=True))
    kept = frozenset(number for number, tier in enumerate(chosen.residence) if tier == "gpu")
    long, short, crossover = _by_length(problem, chosen, options, kept)
    planned = OffloadPlan(
        pieces=pieces,
        kept=kept,
        long=long,
        short=short,
        crossover=crossover,
        kv=chosen.kv,
        depth=_DEPTH[chosen.pipeline],
        kv_layer_bytes=layer_pages_bytes(plan),
        problem=problem,
        chosen=chosen,
        in_ram={"ram": True, "disk": False}.get(options.weights),
    )
    return planned if machine.shared else planned.deepened(problem.rooms)


def _by_length(
    problem: Problem, chosen: Offload, options: OffloadOptions, kept: Numbers
) -> tuple[Numbers, Numbers, int]:
    """Return the pieces that long and short steps stream to the accelerator, and the first length of a long step."""
    long, short = (_on_accelerator(places) - kept for places in (chosen.prompt, chosen.decode))
    return long, short, options.crossover or turning_point(problem, chosen)


def _on_accelerator(places: Sequence[Place]) -> Numbers:
    return frozenset(number for number, place in enumerate(places) if place == "accelerator")


def offload_problem(
    plan: NodePlan,
    pieces: Sequence[NodeSegment],
    machine: NodeMachine,
    options: OffloadOptions,
    tables: Tables | None,
    reserve: int | None = None,
) -> Problem:
    """Return the input of the cost model for one node.

    Args:
        plan: the node's part of the deployment.
        pieces: all of its pieces, in order of use.
        machine: the node's speeds and memory.
        options: the user's choices.
        tables: tables and predictors, on the master.
        reserve: bytes to leave free on each accelerator because sizes are rounded up to pages of memory. By default
            some pages for each piece, for plans that cut pieces further.
    """
    demand, reserve = need(plan, tables), PAGE * _PAGES_PER_PIECE * len(pieces) if reserve is None else reserve
    smaller = machine.with_cards(lambda card: replace(card, memory=max(0, card.memory - reserve)))
    context = plan.options.pages * PAGE_TOKENS
    work = NodeWork(
        tuple(_segment_work(plan.config, piece, plan) for piece in pieces),
        _VALUE * plan.config.hidden,
        TableWork(demand.head, demand.head),
    )
    return Problem(
        work=work,
        machine=replace(smaller, memory=plan.options.memory or machine.memory),
        request=Workload(min(512, context // 2), min(128, context // 2), 1, context),
        needs=Needs(demand.token, demand.fixed, kernel_room(plan)),
        limits=Limits(options.weights_tier, options.kv_tier, options.pipeline_kind, *_forced(options)),
        longest=plan.options.prefill_tokens,
        reserve=reserve,
    )


def _rounding(plan: NodePlan, pieces: Sequence[NodeSegment]) -> int:
    """Return the bytes that rounding adds to experts and KV pages on an accelerator: the cost model leaves it out."""
    weights = sum(_size(piece) - piece.nbytes for piece in pieces if piece.block.kind == "experts")
    layers = sum(piece.block.kind == "attention" for piece in pieces)
    kv = 2 * plan.kv_heads * vector_bytes(plan.config.head_dim, plan.options.kv_dtype)
    return weights + layers * (layer_pages_bytes(plan) - plan.options.pages * PAGE_TOKENS * kv)


def _forced(options: OffloadOptions) -> tuple[Place | None, Place | None]:
    """Return where prompts and single tokens must be computed, or None for both if no crossover was given."""
    if options.crossover is None:
        return None, None
    return "accelerator", "accelerator" if options.crossover == 1 else "host"


def _segment_work(config: ModelConfig, piece: NodeSegment, plan: NodePlan) -> SegmentWork:
    """Return the work of one piece for the cost model.

    Its bytes are rounded up to whole pages of memory. Bytes of experts are exact, as only a part of them is used.
    """
    block, weights = piece.block, sum(_weights(run) for run in piece.runs)
    mixture = config.mixture if block.kind == "experts" else None
    if mixture is not None:
        routed = sum(run.nbytes for run in piece.runs if run.name == "neuron")
        chosen = mixture.used / mixture.experts
        return SegmentWork(block.number, block.kind, piece.nbytes, weights, routed=routed, chosen=chosen)
    if block.kind != "attention":
        return SegmentWork(block.number, block.kind, _size(piece), weights)
    kv = 2 * plan.kv_heads * vector_bytes(config.head_dim, plan.options.kv_dtype)
    return SegmentWork(block.number, block.kind, _size(piece), weights, kv, 4 * plan.heads * config.head_dim)


def _weights(run: RunUnits) -> int:
    return len(run.units) * run.layout.width * run.layout.hidden * len(run.layout.parts)


def layer_pages_bytes(plan: NodePlan, kv_heads: int | None = None) -> int:
    """Return the bytes of one layer's KV pages with `kv_heads` heads, by default all of the node's.

    Keys and values each start on a page of memory.
    """
    heads = plan.kv_heads if kv_heads is None else kv_heads
    half = page_bytes(1, heads, plan.config.head_dim, plan.options.kv_dtype) // 2
    return 2 * round_up(half * plan.options.pages)


def _size(piece: NodeSegment) -> int:
    return round_up(piece.nbytes)
