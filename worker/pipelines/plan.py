"""The plan of a node's accelerator for batches: the roofline model's policy, translated into pieces of weights.

The same share of every layer (r_w) is resident, so that the link has the same work in each. Attention is made resident
first, as a whole; then neurons, from the first unit on. The keys and values of the first heads are resident (r_c).

The other pieces are streamed through a ring of two halves, each as large as the largest layer's streamed pieces. While
one half is used for computing, the other is filled chunk by chunk. Each chunk of experts has its own slot in a half
and is loaded, awaited and released by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from scheduler.budget import LONGEST_CHUNK
from scheduler.model.machine import NodeMachine
from scheduler.model.offload.memory import Needs
from scheduler.model.offload.work import KvTier, Offload, Place, TableWork, Tier
from scheduler.model.ring import Ring, with_lags
from scheduler.model.roofline.latency import without_partial_ffn
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

_PART = 1e-6  # tolerance when a share is converted to a number of heads
_CHUNK_SHARE = 8  # a chunk's activations take at most 1/8 of the accelerator's memory


@dataclass(frozen=True)
class BatchPlan(OffloadPlan):
    """The plan for batches. Steps of any length stream all pieces that are not resident.

    Attributes:
        policy: the roofline model's choice.
        asked: the problem that it solved.
        card_kv_heads: the number of KV heads, from the first on, with keys and values on the accelerator.
        kv_heads: the number of KV heads of the node. Keys and values of the others lie in host memory.
        room_pages: the largest number of KV pages of one micro-batch.
        room_bytes: bytes of `room_pages` pages in one layer, for heads whose keys and values are in host memory.
        chunking: the number or size of the chunks of a layer.
    """

    policy: BatchPolicy = field(kw_only=True)
    asked: BatchProblem = field(kw_only=True)
    card_kv_heads: int = field(kw_only=True)
    kv_heads: int = field(kw_only=True)
    room_pages: int = field(kw_only=True)
    room_bytes: int = field(kw_only=True)
    chunking: Chunking = field(kw_only=True)

    @property
    def gathers(self) -> bool:
        """True: one call computes all experts of a block, even if they lie in several places."""
        return True

    def named(self, piece: int) -> str:
        """Return the name of a streamed piece in traces and errors, with a number if its block has several."""
        block, number = self.pieces[piece].block, self._numbers[piece]
        alone = number == 1 and all(other.block is not block for other in self.pieces[piece + 1 : piece + 2])
        return block.name if alone else f"{block.name}, chunk {number}"

    @property
    def longest(self) -> int:
        """The number of tokens of the longest step, which is computed in micro-batches."""
        return self.asked.step

    @property
    def staged(self) -> list[int]:
        """An empty list: KV pages visit by micro-batch, not by layer."""
        return []

    @property
    def host_kv_heads(self) -> int:
        """The number of KV heads per layer with keys and values in host memory."""
        return self.kv_heads - self.card_kv_heads

    @property
    def rooms(self) -> int:
        """The number of micro-batches whose visiting KV pages fit on the accelerator at once."""
        return ROOMS if self.kv == "ram" else 0

    @property
    def staged_bytes(self) -> int:
        """Bytes of host memory that collect keys and values on their way to or from the accelerator."""
        return self.rooms * self.room_bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes of accelerator memory that the plan takes, without the buffers of kernels."""
        divided = len(self.layers) * self.kv_layer_bytes if self.kv == "ram" else 0
        return super().memory_bytes + self.rooms * self.room_bytes + divided

    @property
    def layer_bytes(self) -> int:
        """Bytes of the streamed pieces of the largest layer."""
        return max((round_up(self._slots(layer)[-1].stop) for layer in self._passing), default=0)

    @property
    def chunk_bytes(self) -> int:
        """The size of the largest chunk in bytes (weights paging, section 4.1)."""
        chunks = (self.pieces[at] for at in self.streamed_pieces)
        largest = max((each.nbytes for each in chunks if each.block.kind == "experts"), default=0)
        return max(round_up(self.chunking.size(self.layer_bytes)), largest)

    def ring(self, numbers: Numbers) -> Ring:
        """Return the ring for the pieces `numbers`: layers lie in its two halves in turn."""
        if not numbers:
            return super().ring(numbers)
        layers = self._passing * (1 + len(self._passing) % 2)
        uses = [piece for layer in layers for piece in layer]
        offsets = [
            turn % 2 * self.layer_bytes + slot.start for turn, layer in enumerate(layers) for slot in self._slots(layer)
        ]
        return with_lags(uses, [piece.nbytes for piece in self.pieces], 2 * self.layer_bytes, offsets)

    def ring_cuts(self, card: int) -> list[int]:
        """Return an empty list: the ring's memory is allocated in one piece."""
        return []

    def ring_bytes(self, card: int) -> int:
        """Return the bytes of the ring."""
        return 2 * self.layer_bytes

    def _slots(self, layer: Sequence[int]) -> list[slice]:
        """Return the byte range of each piece of a layer in its half of the ring.

        Each block starts on a page of memory, and its chunks lie back to back.
        """
        slots, before = list[slice](), None
        for piece in (self.pieces[number] for number in layer):
            end = slots[-1].stop if slots else 0
            begin = end if piece.block is before else round_up(end)
            slots.append(slice(begin, begin + piece.nbytes))
            before = piece.block
        return slots

    @cached_property
    def _numbers(self) -> dict[int, int]:
        """The position of each streamed piece among those of its block, from 1 on."""
        found, counts = dict[int, int](), dict[int, int]()
        for piece in self.streamed_pieces:
            block = self.pieces[piece].block.number
            found[piece] = counts[block] = counts.get(block, 0) + 1
        return found

    @cached_property
    def _passing(self) -> list[list[int]]:
        """The streamed pieces, layer by layer, without layers that have none."""
        found: dict[int, list[int]] = {}
        for piece in self.streamed_pieces:
            found.setdefault(self.pieces[piece].block.layer, []).append(piece)
        return list(found.values())


def decide_batch(
    plan: NodePlan,
    machine: NodeMachine,
    options: OffloadOptions,
    tables: Tables | None = None,
    chunking: Chunking | None = None,
) -> BatchPlan:
    """Choose the plan for batches of as many sequences as the node has pages for, or as its group agreed on.

    Args:
        plan: the node's part of the deployment.
        machine: the node's speeds and memory.
        options: the user's choices.
        tables: tables and predictors, on the master.
        chunking: the chunks of a layer; by default as many as there are micro-batches.

    Raises:
        PlanError: if not even one sequence fits, or if the node is one of several and the master sent no settings for
            batches (`worker.pipelines.group.agree`).
    """
    if plan.size > 1 and plan.options.batch is None:
        raise PlanError(
            "several nodes can compute a batch only with settings from the master, which sent none; use the same "
            "version of tpi on all nodes, or leave out --pipeline batch"
        )
    asked = batch_problem(plan, machine, options, tables)
    policy = best_policy(asked).policy
    if options.weights != "gpu":
        policy = without_partial_ffn(asked, policy)
    return _within(machine, planned_batch(plan, asked, policy, options, tables, chunking), plan, tables, options)


def _within(
    machine: NodeMachine, found: BatchPlan, plan: NodePlan, tables: Tables | None, options: OffloadOptions
) -> BatchPlan:
    """Return `found` with fewer resident weights or KV heads if rounding to pages and units makes it too large.

    Raises:
        PlanError: if nothing is left to remove; names the `--gpu-memory` that would suffice.
    """
    device, edges = machine.accelerator, PAGE * len(plan.blocks)
    assert device is not None
    while (beyond := found.memory_bytes - device.memory) > 0 and (less := _less(found, beyond + edges)) is not None:
        found = planned_batch(plan, found.asked, less, options, tables, found.chunking)
    if beyond > 0:
        least = -(-found.memory_bytes >> 20)
        raise PlanError(f"{device.memory >> 20}MiB of GPU memory are too little; --gpu-memory {least}MiB would do")
    return found


def _less(found: BatchPlan, nbytes: int) -> BatchPolicy | None:
    """Return the policy of `found` with `nbytes` bytes less of resident weights.

    If no weights are resident, one KV head less is. Return None if nothing may be removed.
    """
    policy, total = found.policy, found.asked.layer.layers * found.asked.layer.nbytes
    if policy.weights_kept > 0:
        return replace(policy, weights_kept=max(0.0, policy.weights_kept - nbytes / total))
    if found.card_kv_heads and found.asked.limits.kv is None:
        return replace(policy, kv_kept=(found.card_kv_heads - 1) / found.kv_heads)
    return None


def prefers_batches(
    plan: NodePlan, machine: NodeMachine, options: OffloadOptions, tables: Tables | None = None
) -> bool:
    """Return True if the roofline model predicts that the accelerator should compute neurons for this node's batch."""
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
    """Translate a policy into this node's pieces. The accelerator computes neurons and all products with weights.

    The policy's share of keys and values is rounded down to whole heads.

    Args:
        plan: the node's part of the deployment.
        asked: the problem that the policy solves.
        policy: the policy.
        options: the user's choices.
        tables: tables and predictors, on the master.
        chunking: the chunks of a layer; by default as many as there are micro-batches.
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
    kv: KvTier = "gpu" if policy.kv_kept == 1 else "ram"  # "ram" if keys and values of any head are in host memory
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
        card_kv_heads=heads,
        kv_heads=plan.kv_heads,
        room_pages=pages,
        room_bytes=2 * round_up(half * pages),
        chunking=chunking,
    )


def room_pages(plan: NodePlan, micro_batch: int) -> int:
    """Return the largest number of KV pages of one micro-batch, which is the same on all nodes of a group."""
    usual, longest = pages_for(plan.options.request.tokens), pages_for(plan.options.context)
    return min(plan.options.pages, max(micro_batch * usual, longest + 1))


def batch_problem(
    plan: NodePlan, machine: NodeMachine, options: OffloadOptions, tables: Tables | None = None
) -> BatchProblem:
    """Return the input of the roofline model for one node.

    A step has at most `prefill_tokens` tokens. The accelerator, if there is one, computes neurons. The settings that a
    group agreed on are fixed.
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
    """Return the machine with the memory that is available: less a reserve for rounding, and within `--memory`."""
    device, memory = machine.accelerator, plan.options.memory or machine.memory
    if device is not None:
        room = min(device.memory, memory // 2) if device.shared else device.memory  # a shared memory is halved
        memory -= room if device.shared else 0
        device = replace(device, memory=max(0, room - PAGE * 6 * len(plan.blocks)))
    return replace(machine, accelerator=device, memory=memory)


def _limits(options: OffloadOptions, agreed: GroupBatch | None, machine: NodeMachine, kv_heads: int) -> PolicyLimits:
    sizes = (agreed.micro_batches, agreed.batch) if agreed else (None, None)
    if machine.accelerator is None:  # without an accelerator all is in host memory: `worker.pipelines.group.hosted`
        return PolicyLimits(False, False, "ram", "ram", 1, *sizes)
    return PolicyLimits(None, True, options.weights_tier, options.kv_tier, kv_heads, *sizes)


def prompt_chunk(plan: NodePlan, machine: NodeMachine) -> int:
    """Return how many tokens of prompts to compute at once.

    The number is halved until their activations take at most 1/8 of the accelerator's memory, or of the host's.
    """
    chunk, token = min(plan.options.prefill_tokens, LONGEST_CHUNK), computing_bytes(plan)
    room = machine.accelerator.memory if machine.accelerator else machine.memory
    while chunk > 1 and chunk * token > room // _CHUNK_SHARE:
        chunk //= 2
    return chunk
