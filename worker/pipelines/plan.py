"""What a node keeps on its accelerator, and what passes through it, for batches: the roofline model's policy in pieces.

Every layer keeps the same share (r_w), so that the link has the same to do in each. Attention is kept first, whole;
then units of the neurons from the first on. Of keys and values those of the first heads stay (r_c). What passes through
has two places by turns, each as large as the most that passes of one layer: while one is computed with, the other is
filled, chunk by chunk. Each chunk of experts has a slot there, and is loaded, awaited and given back by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

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
from worker.pipelines.chunks.cutting import Chunking, pieces_of
from worker.pipelines.visiting import ROOMS
from worker.plan.fit import Tables, computing_bytes, need, passing_bytes
from worker.plan.node_plan import NodePlan
from worker.plan.offload import Numbers, OffloadPlan, layer_pages_bytes, offload_problem

_PART = 1e-6  # of a head: as much less still counts as one
_CHUNK_SHARE = 8  # a chunk's activations take at most one part in so many of the accelerator's memory


@dataclass(frozen=True)
class BatchPlan(OffloadPlan):
    """The decision. All that is not kept passes through, in steps of any length.

    `policy` is the roofline model's answer to `asked`; keys and values of the first `kv_heads_there` of the node's
    `kv_heads` stay, those of the others live in RAM. `room_pages` are the pages of one micro-batch at most, and
    `room_bytes` what the others take of them in one layer. `chunking` says how many chunks a layer passes in.
    """

    policy: BatchPolicy = field(kw_only=True)
    asked: BatchProblem = field(kw_only=True)
    kv_heads_there: int = field(kw_only=True)
    kv_heads: int = field(kw_only=True)
    room_pages: int = field(kw_only=True)
    room_bytes: int = field(kw_only=True)
    chunking: Chunking = field(kw_only=True)

    @property
    def gathers(self) -> bool:
        """See `OffloadPlan.gathers`."""
        return True

    def named(self, piece: int) -> str:
        """See `OffloadPlan.named`; what passes of experts in several chunks is numbered."""
        block, number = self.pieces[piece].block, self._numbers[piece]
        alone = number == 1 and all(other.block is not block for other in self.pieces[piece + 1 : piece + 2])
        return block.name if alone else f"{block.name}, chunk {number}"

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
        return max((round_up(self._slots(layer)[-1].stop) for layer in self._passing), default=0)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk at most (weights paging, section 4.1)."""
        chunks = (self.pieces[at] for at in self.lifted)
        largest = max((each.nbytes for each in chunks if each.block.kind == "experts"), default=0)
        return max(round_up(self.chunking.size(self.layer_bytes)), largest)

    def ring(self, there: Numbers) -> Ring:
        """See `OffloadPlan.ring`: layers lie in two places by turns."""
        if not there:
            return super().ring(there)
        layers = self._passing * (1 + len(self._passing) % 2)
        uses = [piece for layer in layers for piece in layer]
        offsets = [
            turn % 2 * self.layer_bytes + slot.start for turn, layer in enumerate(layers) for slot in self._slots(layer)
        ]
        return with_lags(uses, [piece.nbytes for piece in self.pieces], 2 * self.layer_bytes, offsets)

    def ring_cuts(self, card: int) -> list[int]:
        """See `OffloadPlan.ring_cuts`; chunks lie in places of their own, which are not cut."""
        return []

    def ring_bytes(self, card: int) -> int:
        """See `OffloadPlan.ring_bytes`."""
        return 2 * self.layer_bytes

    def _slots(self, layer: Sequence[int]) -> list[slice]:
        """Where pieces of a layer lie in a place: each block from a page of memory on, its chunks back to back."""
        slots, before = list[slice](), None
        for piece in (self.pieces[number] for number in layer):
            end = slots[-1].stop if slots else 0
            begin = end if piece.block is before else round_up(end)
            slots.append(slice(begin, begin + piece.nbytes))
            before = piece.block
        return slots

    @cached_property
    def _numbers(self) -> dict[int, int]:
        """Of each piece that passes through, which of its block's it is, from 1 on."""
        found, counts = dict[int, int](), dict[int, int]()
        for piece in self.lifted:
            block = self.pieces[piece].block.number
            found[piece] = counts[block] = counts.get(block, 0) + 1
        return found

    @cached_property
    def _passing(self) -> list[list[int]]:
        """The pieces that pass through, layer by layer; layers without any are left out."""
        found: dict[int, list[int]] = {}
        for piece in self.lifted:
            found.setdefault(self.pieces[piece].block.layer, []).append(piece)
        return list(found.values())


def decide_batch(
    plan: NodePlan,
    machine: NodeMachine,
    options: OffloadOptions,
    tables: Tables | None = None,
    chunking: Chunking | None = None,
) -> BatchPlan:
    """What goes where on `machine` for as many sequences at once as the node has pages for, or its group agreed on.

    `chunking` as for `planned_batch`.

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
    return _within(machine, planned_batch(plan, asked, policy, options, tables, chunking), plan, tables, options)


def _within(
    machine: NodeMachine, found: BatchPlan, plan: NodePlan, tables: Tables | None, options: OffloadOptions
) -> BatchPlan:
    """The same, or with as much less of the weights on the accelerator as whole pages and units take too much."""
    device, edges = machine.accelerator, PAGE * len(plan.blocks)
    assert device is not None
    while (beyond := found.memory_bytes - device.memory) > 0 and (less := _less(found, beyond + edges)) is not None:
        found = planned_batch(plan, found.asked, less, options, tables, found.chunking)
    if beyond > 0:
        least = -(-found.memory_bytes >> 20)
        raise PlanError(f"{device.memory >> 20}MiB of GPU memory are too little: --gpu-memory {least}MiB would do")
    return found


def _less(found: BatchPlan, nbytes: int) -> BatchPolicy | None:
    """A policy with so many bytes less of the weights on the accelerator, or without them a head less of keys and
    values; None if there is nothing that it need not keep."""
    policy, total = found.policy, found.asked.layer.layers * found.asked.layer.nbytes
    if policy.weights_kept > 0:
        return replace(policy, weights_kept=max(0.0, policy.weights_kept - nbytes / total))
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
    plan: NodePlan,
    asked: BatchProblem,
    policy: BatchPolicy,
    options: OffloadOptions,
    tables: Tables | None = None,
    chunking: Chunking | None = None,
) -> BatchPlan:
    """A policy in this node's pieces; neurons and products are the accelerator's.

    Of keys and values as many whole heads stay as the policy's share has. A layer has as many chunks as there are
    micro-batches, if `chunking` does not say otherwise.
    """
    heads = int(policy.kv_kept * plan.kv_heads + _PART)
    share = heads / plan.kv_heads if plan.kv_heads else round(policy.kv_kept)
    policy = replace(policy, kv_kept=share, attention_there=share == 1 or policy.attention_there)
    chunking = chunking or Chunking(policy.micro_batches)
    pieces, kept = pieces_of(plan, policy.weights_kept, chunking)
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
        chunking=chunking,
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
    device, memory = machine.accelerator, plan.options.memory or machine.memory
    if device is not None:
        room = min(device.memory, memory // 2) if device.shared else device.memory  # one memory, in halves
        memory -= room if device.shared else 0
        device = replace(device, memory=max(0, room - PAGE * 6 * len(plan.blocks)))
    return replace(machine, accelerator=device, memory=memory)


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
