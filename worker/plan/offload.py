"""What a node keeps on its accelerator, what passes through it, and where keys and values live (PIPO, section 3.5).

Pieces that stay on the accelerator are computed there, always. The others lie in the host's memory or on its disk: a
step takes them to the accelerator, one after the other, or computes them where they lie, and which of the two may
differ between long steps and short ones. `scheduler.model.offload` chooses by predicted time; here its answer becomes
the pieces, the ring and the pages of one node.
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
from worker.plan.fit import Tables, need, there_bytes
from worker.plan.node_plan import NodePlan, RunUnits
from worker.plan.segments import NodeSegment, cut_pieces

_DEPTH = {"performance": 2, "memory": 1}  # segments in the ring at once, and layers' pages beside them
_DEEPEST = 4  # segments in a ring: more have nothing left to even out
_VALUE = 4  # bytes of an activation
_PAGES_BESIDE = 5  # pages of memory for each piece that is cut once more
Numbers = frozenset[int]


@dataclass(frozen=True)
class OffloadPlan:
    """The decision. Pieces are all of the node's, in order of use; numbers index them.

    Each piece is one accelerator's, the device that it names: it stays in its memory, passes through its ring, or is
    computed by the host in its place. A layer's keys and values are where its attention is.
    """

    pieces: tuple[NodeSegment, ...]
    kept: Numbers  # stay on their accelerator
    long: Numbers  # of the others: computed there in steps of `crossover` tokens and more
    short: Numbers  # and in shorter ones
    crossover: int
    kv: KvTier
    depth: int  # of the ring, and of the pages that visit the accelerator
    kv_layer_bytes: int  # of one layer's pages
    problem: Problem  # as the cost model was asked
    chosen: Offload  # and what it answered
    ahead: int = 0  # segments in a ring at once, if more than `depth`
    in_ram: bool | None = None  # where the others lie: all in memory, all on disk, or (None) as fits
    remark: str = ""  # why it is this plan and no other, for people

    @property
    def longest(self) -> int:
        """Tokens of the longest step that the accelerators have room for."""
        return self.problem.tokens

    @property
    def gathers(self) -> bool:
        """Whether all of a block's experts are computed in one call, wherever they lie."""
        return False

    def named(self, piece: int) -> str:
        """What traces and errors call what passes through."""
        return self.pieces[piece].block.name

    @property
    def fed(self) -> list[int]:
        """Pieces that lie in the host's memory or on its disk, in order of use."""
        return [number for number in range(len(self.pieces)) if number not in self.kept]

    @property
    def lifted(self) -> list[int]:
        """Of these, the ones that pass through the ring."""
        return sorted(self.long | self.short)

    @property
    def cards(self) -> range:
        """The accelerators, by their numbers among the node's devices."""
        return range(1, 1 + max((piece.device for piece in self.pieces), default=1))

    def on(self, card: int) -> Numbers:
        """The pieces of one accelerator."""
        return frozenset(number for number, piece in enumerate(self.pieces) if piece.device == card)

    def ring(self, there: Numbers) -> Ring:
        """Where the pieces `there` pass through, each in its accelerator's memory; its blocks are their numbers."""
        sizes = [_size(piece) for piece in self.pieces]
        depth = self.ahead or self.depth
        return merged([smallest(sorted(there & self.on(card)), sizes, depth) for card in self.cards], sizes)

    def ring_bytes(self, card: int) -> int:
        """Bytes of an accelerator's larger ring, of long steps or of short ones: they take turns."""
        return max(self.ring(there & self.on(card)).size for there in (self.long, self.short))

    def ring_cuts(self, card: int) -> list[int]:
        """Return the offsets in an accelerator's ring that no piece reaches across, in long steps or in short ones."""
        mine = self.on(card)
        rings = [self.ring(there & pieces) for there in (self.long, self.short) for pieces in (mine, there)]
        return cuts_between(
            (offset, offset + _size(self.pieces[piece]))
            for ring in rings
            for piece, offset in zip(ring.blocks, ring.offsets, strict=True)
            if piece in mine
        )

    def deepened(self, rooms: Sequence[int]) -> "OffloadPlan":
        """The same with the deepest rings that so many bytes of each accelerator hold: uneven pieces even out."""
        if self.depth == 1 or not self.lifted:
            return self
        deeper = (replace(self, ahead=ahead) for ahead in range(_DEEPEST, self.depth, -1))
        return next((plan for plan in deeper if all(map(le, plan.card_bytes, rooms))), self)

    @property
    def layers(self) -> list[int]:
        """Layers that attend, in order of use."""
        return list(dict.fromkeys(piece.block.layer for piece in self.pieces if piece.block.kind == "attention"))

    def layers_on(self, card: int) -> list[int]:
        """Those whose attention is one accelerator's, and their keys and values with it."""
        mine = {self.pieces[number].block.layer for number in self.on(card) if self._attends(number)}
        return [layer for layer in self.layers if layer in mine]

    @property
    def staged(self) -> list[int]:
        """Layers that attend on an accelerator, whose keys and values live in the host's memory."""
        there = self.kept | self.long | self.short
        attending = {self.pieces[number].block.layer for number in there if self._attends(number)}
        return [layer for layer in self.layers if layer in attending] if self.kv == "ram" else []

    def staged_on(self, card: int) -> list[int]:
        """Those of one accelerator."""
        mine = set(self.layers_on(card))
        return [layer for layer in self.staged if layer in mine]

    def stages(self, card: int) -> int:
        """Layers' pages that visit an accelerator at once."""
        return min(self.depth, len(self.staged_on(card)))

    @property
    def staged_bytes(self) -> int:
        """Bytes of the host's memory that keys and values are gathered in on their way."""
        return 0

    @property
    def home_heads(self) -> int | None:
        """Of how many of the node's KV heads; None: of all."""
        return None

    @property
    def home(self) -> list[int]:
        """Layers whose keys and values live in the host's memory."""
        return self.layers if self.kv == "ram" else []

    @property
    def memory_bytes(self) -> int:
        """Bytes that all of it takes on the accelerators together, but for the buffers of their kernels."""
        return sum(self.card_bytes)

    @property
    def shared_bytes(self) -> int:
        """Bytes of the host's memory that accelerators take which share it, with the buffers of their kernels."""
        cards = self.problem.machine.cards
        there = self.problem.needs.there.nbytes(self.problem.tokens)
        taken = [(card, size) for card, size in zip(cards, self.card_bytes, strict=False) if card.shared and size]
        return sum(size + there for _, size in taken)

    @property
    def card_bytes(self) -> list[int]:
        """Bytes that it takes on each accelerator."""
        return [self._bytes_on(card) for card in self.cards]

    def _bytes_on(self, card: int) -> int:
        kept = sum(_size(self.pieces[number]) for number in self.kept & self.on(card))
        layers = len(self.layers_on(card)) if self.kv == "gpu" else self.stages(card)
        return kept + self.ring_bytes(card) + layers * self.kv_layer_bytes

    def below(self, sizes: Sequence[int], fitting: Placement) -> Placement:
        """What of the fed pieces stays in the host's memory: what fits, all, or none; `sizes` are theirs.

        Raises:
            PlanError: if all are to stay there and do not fit.
        """
        if self.in_ram and fitting.streamed_bytes:
            short = -(-fitting.streamed_bytes >> 20)
            raise PlanError(f"--weights ram keeps all weights in memory, and {short}MiB of them do not fit; try auto")
        if self.in_ram is not False or not sizes:
            return fitting
        rings = [smallest(range(len(sizes)), sizes, depth) for depth in (2, 1)]
        ring = next((ring for ring in rings if ring.size <= fitting.memory_bytes), rings[-1])
        return Placement(tuple(sizes), frozenset(), ring)

    def over(self, below: Placement) -> "OffloadPlan":
        """The same above a tier that reads from disk in the order of use, though RAM was thought to hold all of it."""
        if not below.streamed_bytes:
            return self
        every = frozenset(self.fed)
        return replace(self, long=every if self.long else self.long, short=every if self.short else self.short)

    def _attends(self, number: int) -> bool:
        return self.pieces[number].block.kind == "attention"


def check_offload(plan: NodePlan, machine: NodeMachine, options: OffloadOptions, tables: Tables | None = None) -> None:
    """Before any weight moves: whether anything fits on `machine` that `options` allow.

    Raises:
        PlanError: if nothing does; names the smallest setting that would do.
    """
    pieces = cut_pieces(plan)
    problem = offload_problem(plan, pieces, machine, options, tables, _rounding(plan, pieces))
    if not feasible(problem):
        raise PlanError(refusal(problem))


def decide_offload(
    plan: NodePlan, machine: NodeMachine, options: OffloadOptions, tables: Tables | None = None
) -> OffloadPlan:
    """What goes where on `machine`, whose accelerator has the memory that is left for this.

    Raises:
        PlanError: if what the options ask for does not fit; names the smallest setting that would do.
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
    """What of the other pieces long and short steps compute on the accelerator, and which steps are long."""
    long, short = (_there(places) - kept for places in (chosen.prompt, chosen.decode))
    return long, short, options.crossover or turning_point(problem, chosen)


def _there(places: Sequence[Place]) -> Numbers:
    return frozenset(number for number, place in enumerate(places) if place == "accelerator")


def offload_problem(
    plan: NodePlan,
    pieces: Sequence[NodeSegment],
    machine: NodeMachine,
    options: OffloadOptions,
    tables: Tables | None,
    reserve: int | None = None,
) -> Problem:
    """The node's part as the cost model knows it.

    `reserve` bytes of each accelerator are set aside for what is rounded up to pages of memory; by default some pages
    for every piece, for plans that cut it once more.
    """
    demand, reserve = need(plan, tables), PAGE * _PAGES_BESIDE * len(pieces) if reserve is None else reserve
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
        needs=Needs(demand.token, demand.fixed, there_bytes(plan)),
        limits=Limits(options.weights_tier, options.kv_tier, options.pipeline_kind, *_forced(options)),
        longest=plan.options.prefill_tokens,
        reserve=reserve,
    )


def _rounding(plan: NodePlan, pieces: Sequence[NodeSegment]) -> int:
    """Bytes by which experts, and the pages of layers, are larger in an accelerator's memory than the model knows."""
    weights = sum(_size(piece) - piece.nbytes for piece in pieces if piece.block.kind == "experts")
    layers = sum(piece.block.kind == "attention" for piece in pieces)
    kv = 2 * plan.kv_heads * vector_bytes(plan.config.head_dim, plan.options.kv_dtype)
    return weights + layers * (layer_pages_bytes(plan) - plan.options.pages * PAGE_TOKENS * kv)


def _forced(options: OffloadOptions) -> tuple[Place | None, Place | None]:
    """Where prompts and tokens are to be computed, if the user says from how many tokens on it is the accelerator."""
    if options.crossover is None:
        return None, None
    return "accelerator", "accelerator" if options.crossover == 1 else "host"


def _segment_work(config: ModelConfig, piece: NodeSegment, plan: NodePlan) -> SegmentWork:
    """Bytes in whole pages of memory, but of experts, whose shares of them count."""
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
    """Bytes of one layer's pages: keys and values of all heads, or of so many, each from the start of a page of memory
    on."""
    heads = plan.kv_heads if kv_heads is None else kv_heads
    half = page_bytes(1, heads, plan.config.head_dim, plan.options.kv_dtype) // 2
    return 2 * round_up(half * plan.options.pages)


def _size(piece: NodeSegment) -> int:
    return round_up(piece.nbytes)
