"""What a node keeps on its accelerator, and what passes through it, for batches: the roofline model's policy in pieces.

Every layer keeps the same share (r_w), so that the link has the same to do in each. Attention is kept first, whole;
then units of the neurons from the first on. Of keys and values those of the first heads stay (r_c). What passes through
has two places by turns, each as large as the most that passes of one layer: while one is computed with, the other is
filled, chunk by chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil

from scheduler.budget import LONGEST_CHUNK
from scheduler.model.machine import NodeMachine
from scheduler.model.offload.memory import Needs
from scheduler.model.offload.work import KvTier, Offload, Place, TableWork, Tier
from scheduler.model.ring import Ring, with_lags
from scheduler.model.roofline.latency import uncut
from scheduler.model.roofline.layer import layer_shape
from scheduler.model.roofline.policy import BatchPolicy, BatchProblem, BatchWork, PolicyLimits
from scheduler.model.roofline.search import best_policy
from tpi.devices.options import OffloadOptions
from tpi.devices.pages import PAGE, round_up
from tpi.errors import PlanError
from tpi.kv import page_bytes, pages_for
from tpi.net.fields import GroupBatch
from tpi.partition import Range
from worker.pipelines.visiting import ROOMS
from worker.plan.fit import Tables, computing_bytes, need, passing_bytes
from worker.plan.node_plan import NodeBlock, NodeLayer, NodePlan, RunUnits
from worker.plan.offload import Numbers, OffloadPlan, layer_pages_bytes, offload_problem
from worker.plan.segments import NodeSegment

_PART = 1e-6  # of a head: as much less still counts as one
_CHUNK_SHARE = 8  # a chunk's activations take at most one part in so many of the accelerator's memory
_LEAST = 1 << 16  # bytes of a chunk: less takes the link no longer than to begin


@dataclass(frozen=True)
class BatchPlan(OffloadPlan):
    """The decision. All that is not kept passes through, in steps of any length.

    `policy` is the roofline model's answer to `asked`; keys and values of the first `kv_heads_there` of the node's
    `kv_heads` stay, those of the others live in RAM. `room_pages` are the pages of one micro-batch at most, and
    `room_bytes` what the others take of them in one layer.
    """

    policy: BatchPolicy = field(kw_only=True)
    asked: BatchProblem = field(kw_only=True)
    kv_heads_there: int = field(kw_only=True)
    kv_heads: int = field(kw_only=True)
    room_pages: int = field(kw_only=True)
    room_bytes: int = field(kw_only=True)

    @property
    def longest(self) -> int:
        """See `OffloadPlan.longest`: what is computed with at once is a micro-batch of it."""
        return self.asked.step

    @property
    def staged(self) -> list[int]:
        """See `OffloadPlan.staged`: pages visit by micro-batches, not by layers."""
        return []

    @property
    def home_heads(self) -> int:
        """See `OffloadPlan.home_heads`."""
        return self.kv_heads - self.kv_heads_there

    @property
    def rooms(self) -> int:
        """Micro-batches' pages on the accelerator at once."""
        return ROOMS if self.kv == "ram" else 0

    @property
    def staged_bytes(self) -> int:
        """See `OffloadPlan.staged_bytes`."""
        return self.rooms * self.room_bytes

    @property
    def memory_bytes(self) -> int:
        """See `OffloadPlan.memory_bytes`."""
        divided = len(self.layers) * self.kv_layer_bytes if self.kv == "ram" else 0
        return super().memory_bytes + self.rooms * self.room_bytes + divided

    @property
    def layer_bytes(self) -> int:
        """The most bytes that pass through for one layer."""
        return max((sum(round_up(self.pieces[at].nbytes) for at in layer) for layer in self._passing), default=0)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk: a layer has as many as there are micro-batches (weights paging, section 4.1)."""
        return max(_LEAST, round_up(ceil(self.layer_bytes / self.policy.micro_batches)))

    def ring(self, there: Numbers) -> Ring:
        """See `OffloadPlan.ring`: layers lie in two places by turns."""
        if not there:
            return super().ring(there)
        sizes, place = [round_up(piece.nbytes) for piece in self.pieces], self.layer_bytes
        layers = self._passing * (1 + len(self._passing) % 2)
        uses, offsets = [], []
        for turn, layer in enumerate(layers):
            at = turn % 2 * place
            for piece in layer:
                uses.append(piece)
                offsets.append(at)
                at += sizes[piece]
        return with_lags(uses, sizes, 2 * place, offsets)

    @cached_property
    def _passing(self) -> list[list[int]]:
        """The pieces that pass through, layer by layer; layers without any are left out."""
        found: dict[int, list[int]] = {}
        for piece in self.lifted:
            found.setdefault(self.pieces[piece].block.layer, []).append(piece)
        return list(found.values())


def decide_batch(
    plan: NodePlan, machine: NodeMachine, options: OffloadOptions, tables: Tables | None = None
) -> BatchPlan:
    """What goes where on `machine` for as many sequences at once as the node has pages for, or its group agreed on.

    Raises:
        PlanError: if not one sequence fits, or several nodes have not agreed (`worker.pipelines.group.agree`).
    """
    if plan.size > 1 and plan.options.batch is None:
        raise PlanError(
            "several nodes divide a batch as the master says, and this one was told nothing; use the same version of "
            "tpi on all nodes, or leave --pipeline batch out"
        )
    asked = batch_problem(plan, machine, options, tables)
    policy = best_policy(asked).policy
    if options.weights != "gpu":
        policy = uncut(asked, policy)
    return _within(machine, planned_batch(plan, asked, policy, options, tables), plan, tables, options)


def _within(
    machine: NodeMachine, found: BatchPlan, plan: NodePlan, tables: Tables | None, options: OffloadOptions
) -> BatchPlan:
    """The same, or with as much less of the weights on the accelerator as whole pages and units take too much."""
    device = machine.accelerator
    assert device is not None
    while (beyond := found.memory_bytes - device.memory) > 0 and (less := _less(found, beyond)) is not None:
        found = planned_batch(plan, found.asked, less, options, tables)
    if beyond > 0:
        least = -(-found.memory_bytes >> 20)
        raise PlanError(f"{device.memory >> 20}MiB of GPU memory are too little: --gpu-memory {least}MiB would do")
    return found


def _less(found: BatchPlan, beyond: int) -> BatchPolicy | None:
    """A policy with so many bytes less of the weights on the accelerator, or without them a head less of keys and
    values; None if there is nothing that it need not keep."""
    policy, total = found.policy, found.asked.layer.layers * found.asked.layer.nbytes
    if policy.weights_kept > 0:
        return replace(policy, weights_kept=max(0.0, policy.weights_kept - (beyond + PAGE * len(found.pieces)) / total))
    if found.kv_heads_there and found.asked.limits.kv is None:
        return replace(policy, kv_kept=(found.kv_heads_there - 1) / found.kv_heads)
    return None


def prefers_batches(
    plan: NodePlan, machine: NodeMachine, options: OffloadOptions, tables: Tables | None = None
) -> bool:
    """Whether the roofline model has the accelerator compute neurons, for as many sequences as there is room for."""
    asked = batch_problem(plan, machine, options, tables)
    if machine.accelerator is None:
        return False
    try:
        return best_policy(replace(asked, limits=replace(asked.limits, ffn_there=None))).policy.ffn_there
    except PlanError:
        return False


def planned_batch(
    plan: NodePlan, asked: BatchProblem, policy: BatchPolicy, options: OffloadOptions, tables: Tables | None = None
) -> BatchPlan:
    """A policy in this node's pieces; neurons and products are the accelerator's.

    Of keys and values as many whole heads stay as the policy's share has.
    """
    heads = int(policy.kv_kept * plan.kv_heads + _PART)
    share = heads / plan.kv_heads if plan.kv_heads else round(policy.kv_kept)
    policy = replace(policy, kv_kept=share, attention_there=share == 1 or policy.attention_there)
    pieces, kept = _pieces(plan, policy.weights_kept)
    others = frozenset(range(len(pieces))) - kept
    pages = room_pages(plan, policy.micro_batch)
    places: tuple[Place, ...] = tuple("accelerator" for _ in pieces)
    tiers: tuple[Tier, ...] = tuple("gpu" if at in kept else "ram" for at in range(len(pieces)))
    kv: KvTier = "gpu" if policy.kv_kept == 1 else "ram"  # if not all, those of other heads
    half = page_bytes(1, plan.kv_heads - heads, plan.config.head_dim, plan.options.kv_dtype) // 2
    return BatchPlan(
        pieces=pieces,
        kept=kept,
        long=others,
        short=others,
        crossover=1,
        kv=kv,
        depth=2,
        kv_layer_bytes=layer_pages_bytes(plan, heads),
        problem=offload_problem(plan, pieces, asked.machine, options, tables),
        chosen=Offload(tiers, places, places, kv, "performance"),
        in_ram={"ram": True, "disk": False}.get(options.weights),
        policy=policy,
        asked=asked,
        kv_heads_there=heads,
        kv_heads=plan.kv_heads,
        room_pages=pages,
        room_bytes=2 * round_up(half * pages),
    )


def room_pages(plan: NodePlan, micro_batch: int) -> int:
    """Pages of one micro-batch at most; the same on all nodes of a group."""
    usual, longest = pages_for(plan.options.request.tokens), pages_for(plan.options.context)
    return min(plan.options.pages, max(micro_batch * usual, longest + 1))


def batch_problem(
    plan: NodePlan, machine: NodeMachine, options: OffloadOptions, tables: Tables | None = None
) -> BatchProblem:
    """The node's part as the roofline model knows it; a step has at most the tokens that the master asks for.

    Neurons are the accelerator's, if there is one. What a group agreed on is insisted on.
    """
    demand, agreed = need(plan, tables), plan.options.batch
    runs = [(block.kind, run.layout, len(run.units)) for block in plan.blocks for run in block.runs]
    layer = layer_shape(plan.config, runs, plan.heads, plan.kv_heads, plan.options.kv_dtype)
    request, steps = plan.options.request, plan.options.prefill_tokens
    each = max(1, pages_for(request.tokens))
    used = _within_blocks(machine, plan)
    token, passing = computing_bytes(plan), passing_bytes(plan) if agreed else 0
    return BatchProblem(
        layer,
        used,
        BatchWork(max(1, min(steps, plan.options.pages // each)), request.prompt, request.answer),
        Needs(token, demand.fixed - (agreed.chunk * token if agreed else 0)),
        agreed.chunk if agreed else prompt_chunk(plan, used),
        steps,
        TableWork(demand.head, demand.head),
        _limits(options, agreed, used, max(1, plan.kv_heads)),
        -(-plan.options.pages // each),
        passing,
    )


def _within_blocks(machine: NodeMachine, plan: NodePlan) -> NodeMachine:
    """The machine with what is left of its memories: pieces begin on pages of memory, and the node has a limit."""
    device = machine.accelerator
    if device is not None:
        device = replace(device, memory=max(0, device.memory - PAGE * 6 * len(plan.blocks)))
    return replace(machine, accelerator=device, memory=plan.options.memory or machine.memory)


def _limits(options: OffloadOptions, agreed: GroupBatch | None, machine: NodeMachine, kv_heads: int) -> PolicyLimits:
    sizes = (agreed.micro_batches, agreed.batch) if agreed else (None, None)
    if machine.accelerator is None:  # what a host alone has is all in RAM: see `worker.pipelines.group.hosted`
        return PolicyLimits(False, False, "ram", "ram", 1, *sizes)
    return PolicyLimits(None, True, options.weights_tier, options.kv_tier, kv_heads, *sizes)


def prompt_chunk(plan: NodePlan, machine: NodeMachine) -> int:
    """Tokens of prompts at once: halved until their activations are modest on the accelerator."""
    chunk, token = min(plan.options.prefill_tokens, LONGEST_CHUNK), computing_bytes(plan)
    room = machine.accelerator.memory if machine.accelerator else machine.memory
    while chunk > 1 and chunk * token > room // _CHUNK_SHARE:
        chunk //= 2
    return chunk


def _pieces(plan: NodePlan, kept: float) -> tuple[tuple[NodeSegment, ...], Numbers]:
    """All pieces in order of use, and the numbers of those that stay."""
    found: list[NodeSegment] = []
    stay: set[int] = set()
    for layer in plan.layers:
        for piece, stays in _layer(layer, kept * sum(block.nbytes for block in layer.blocks)):
            if stays:
                stay.add(len(found))
            found.append(replace(piece, device=1))
    return tuple(found), frozenset(stay)


def _layer(layer: NodeLayer, room: float) -> Iterator[tuple[NodeSegment, bool]]:
    """Each block as what stays and what passes through, with whether it stays."""
    for block in layer.blocks:
        first, rest = _cut(block, room)
        room -= sum(run.nbytes for run in first)
        for runs, stays in ((first, True), (rest, False)):
            if runs:
                yield NodeSegment(block, runs), stays


def _cut(block: NodeBlock, room: float) -> tuple[tuple[RunUnits, ...], tuple[RunUnits, ...]]:
    """A block's units that fit into `room` bytes, from the first on, and the others; some blocks are one piece."""
    if block.nbytes <= room + 1:
        return block.runs, ()
    if block.kind == "attention" or (block.kind == "ffn" and len(block.runs) > 1):
        return (), block.runs
    first: list[RunUnits] = []
    rest: list[RunUnits] = []
    for run in block.runs:
        count = min(len(run.units), int(room // run.layout.unit_bytes)) if not rest else 0
        middle = run.units.first + count
        room -= count * run.layout.unit_bytes
        first += [run.cut(Range(run.units.first, middle))] if count else []
        rest += [run.cut(Range(middle, run.units.last))] if count < len(run.units) else []
    return tuple(first), tuple(rest)
