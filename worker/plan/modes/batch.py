"""The mode for batches: the roofline model's policy, translated into pieces of weights (docs/batching.md).

The same share of every layer (r_w) is resident, so that the link has the same work in each. Attention is made resident
first, as a whole; then neurons, from the first unit on. The keys and values of the first heads are resident (r_c).

The other pieces are streamed through a ring of two halves, each as large as the largest layer's streamed pieces. While
one half is used for computing, the other is filled chunk by chunk. Each chunk of experts has its own slot in a half
and is loaded, awaited and released by itself.

A node without an accelerator whose group computes a batch holds all its weights in memory.
"""

from dataclasses import dataclass, replace

from scheduler.budget import Budget, sufficient_budget
from scheduler.model.machine import NodeMachine
from scheduler.model.offload.memory import Needs
from scheduler.model.offload.work import KvTier, Offload, Place, Tier
from scheduler.model.roofline.latency import without_partial_ffn
from scheduler.model.roofline.layer import layer_shape
from scheduler.model.roofline.policy import BatchPolicy, BatchProblem, BatchWork, PolicyLimits
from scheduler.model.roofline.search import best_policy
from scheduler.model.sizes import LONGEST_CHUNK
from tpi.devices.options import OffloadOptions
from tpi.devices.pages import PAGE, round_up
from tpi.errors import PlanError
from tpi.kernels.kv import page_bytes, pages_for
from tpi.net.fields import GroupBatch
from worker.node_plan import NodePlan
from worker.plan.case import Candidate, Case, head_work, layer_pages_bytes
from worker.plan.chunks import Chunking, pieces_of
from worker.plan.fit import Tables, computing_bytes, need, passing_bytes
from worker.plan.modes.stream import on_the_host
from worker.plan.offload import MemoryRule, OffloadPlan

BUFFERS = 2  # buffers for KV pages on the accelerator: one is used for computing while the other is loaded
_PART = 1e-6  # tolerance when a share is converted to a number of heads
_CHUNK_SHARE = 8  # a chunk's activations take at most 1/8 of the accelerator's memory


@dataclass(frozen=True)
class BatchSettings:
    """The settings with which a node computes batches. Steps of any length stream all pieces that are not resident.

    Attributes:
        policy: the policy that the roofline model chose.
        problem: the input for which it was chosen.
        card_kv_heads: the number of KV heads, from the first on, with keys and values on the accelerator.
        buffer_pages: the largest number of KV pages of one micro-batch.
        buffers: the number of micro-batches whose KV pages can be on the accelerator at the same time.
        chunking: the number or size of the chunks of a layer.
        chunk_bytes: the size of the largest chunk in bytes (weights paging, section 4.1).
    """

    policy: BatchPolicy
    problem: BatchProblem
    card_kv_heads: int
    buffer_pages: int
    buffers: int
    chunking: Chunking
    chunk_bytes: int


def propose(case: Case) -> Candidate[BatchSettings | None] | None:
    """Return the plan for batches of as many sequences as the node has pages for, or as its group agreed on.

    If neither the master nor the user asks for batches, return a plan only if batches are predicted to be faster: the
    node must be alone, and its accelerator should compute neurons by the roofline model. Otherwise return None.

    Raises:
        PlanError: if batches are asked for and cannot be computed, or not even one sequence fits.
    """
    if case.accelerated is None:
        check_hosted(case.plan, case.host_budget[0], case.tables)
        return on_the_host(case, "batch")
    asked = case.plan.options.batch is not None or case.options.pipeline == "batch"
    why = refusal(case.plan, case.accelerated, case.options)
    if why and asked:
        raise PlanError(why)
    if not asked and (why or not _preferred(case)):
        return None
    return planned(case)


def planned(case: Case, chunking: Chunking | None = None) -> Candidate[BatchSettings]:
    """Choose the plan for batches on a node with an accelerator.

    Args:
        case: the node to plan for.
        chunking: the chunks of a layer; by default as many as there are micro-batches.

    Raises:
        PlanError: if not even one sequence fits, or if the node is one of several and the master sent no settings for
            batches (`worker.pipelines.agree`).
    """
    plan = case.plan
    if plan.size > 1 and plan.options.batch is None:
        raise PlanError(
            "several nodes can compute a batch only with settings from the master, which sent none; use the same "
            "version of tpi on all nodes, or leave out --pipeline batch"
        )
    asked = problem_of(case)
    policy = best_policy(asked).policy
    if case.options.weights != "gpu":
        policy = without_partial_ffn(asked, policy)
    return _within(case, with_policy(case, asked, policy, chunking))


def _within(case: Case, found: Candidate[BatchSettings]) -> Candidate[BatchSettings]:
    """Return `found`, with fewer resident weights or KV heads if rounding to pages and units makes it too large.

    Raises:
        PlanError: if nothing is left to remove; names the `--gpu-memory` that would suffice.
    """
    device, edges = case.machine and case.machine.accelerator, PAGE * len(case.plan.blocks)
    assert device is not None
    while (beyond := _bytes(found) - device.memory) > 0 and (less := _less(case, found, beyond + edges)) is not None:
        found = with_policy(case, found.details.problem, less, found.details.chunking)
    if beyond > 0:
        least = -(-_bytes(found) >> 20)
        raise PlanError(f"{device.memory >> 20}MiB of GPU memory are too little; --gpu-memory {least}MiB would do")
    return found


def _bytes(found: Candidate[BatchSettings]) -> int:
    assert found.offload is not None
    return found.offload.memory_bytes


def _less(case: Case, found: Candidate[BatchSettings], nbytes: int) -> BatchPolicy | None:
    """Return a policy with fewer bytes resident on the accelerator than the policy of `found`.

    Remove `nbytes` bytes of resident weights, or, if no weights are resident, one resident KV head. Return None if
    nothing is left that may be removed.
    """
    settings = found.details
    policy, layer = settings.policy, settings.problem.layer
    if policy.weights_kept > 0:
        return replace(policy, weights_kept=max(0.0, policy.weights_kept - nbytes / (layer.layers * layer.nbytes)))
    if settings.card_kv_heads and settings.problem.limits.kv is None:
        return replace(policy, kv_kept=(settings.card_kv_heads - 1) / case.plan.kv_heads)
    return None


def _preferred(case: Case) -> bool:
    """Return True if the roofline model predicts that the accelerator should compute neurons for this node's batch."""
    assert case.machine is not None  # it has an accelerator
    if case.plan.size > 1 or not batches_allowed(case.plan, case.machine, case.options):
        return False
    asked = problem_of(case)
    try:
        return best_policy(replace(asked, limits=replace(asked.limits, ffn_there=None))).policy.ffn_there
    except PlanError:
        return False


def with_policy(
    case: Case, asked: BatchProblem, policy: BatchPolicy, chunking: Chunking | None = None
) -> Candidate[BatchSettings]:
    """Return the plan that cuts this node's blocks into pieces as a policy of the roofline model says.

    The accelerator computes neurons and all products with weights. The policy's share of keys and values on the
    accelerator is rounded down to whole heads.

    Args:
        case: the node to plan for.
        asked: the input of the roofline model.
        policy: the policy, which solves `asked`.
        chunking: the chunks of a layer; by default as many as there are micro-batches.
    """
    plan = case.plan
    heads = int(policy.kv_kept * plan.kv_heads + _PART)
    share = heads / plan.kv_heads if plan.kv_heads else round(policy.kv_kept)
    policy = replace(policy, kv_kept=share, attention_there=share == 1 or policy.attention_there)
    chunking = chunking or Chunking(policy.micro_batches)
    pieces, kept = pieces_of(plan, policy.weights_kept, chunking)
    others = frozenset(range(len(pieces))) - kept
    pages = buffer_pages(plan, policy.micro_batch)
    places: tuple[Place, ...] = tuple("accelerator" for _ in pieces)
    tiers: tuple[Tier, ...] = tuple("gpu" if at in kept else "ram" for at in range(len(pieces)))
    kv: KvTier = "gpu" if policy.kv_kept == 1 else "ram"
    half = page_bytes(1, plan.kv_heads - heads, plan.config.head_dim, plan.options.kv_dtype) // 2
    rooms, room_bytes = (BUFFERS if kv == "ram" else 0), 2 * round_up(half * pages)
    each = layer_pages_bytes(plan, heads)
    divided = sum(block.kind == "attention" for block in plan.blocks) * each if kv == "ram" else 0
    offload = OffloadPlan(
        pieces=pieces,
        resident=kept,
        long=others,
        short=others,
        crossover=1,
        kv=kv,
        depth=2,
        kv_layer_bytes=each,
        problem=replace(case, machine=asked.machine).problem(pieces),
        chosen=Offload(tiers, places, places, kv, "performance"),
        longest=asked.step,
        chunked=True,
        host_kv_heads=plan.kv_heads - heads,
        staged_bytes=rooms * room_bytes,
        other_bytes=rooms * room_bytes + divided,
        memory=MemoryRule.of(case.options.weights),
    )
    chunk = chunk_bytes(offload, chunking)
    return Candidate("batch", BatchSettings(policy, asked, heads, pages, rooms, chunking, chunk), offload)


def chunk_bytes(offload: OffloadPlan, chunking: Chunking) -> int:
    """Return the most bytes that one copy over the link may have (MoE-Lightning's weights paging, section 4.1).

    That is the size of a chunk of the layer that streams most, or of the largest chunk of experts if that is larger.
    """
    chunks = (offload.pieces[at] for at in offload.streamed_pieces)
    largest = max((each.nbytes for each in chunks if each.block.kind == "experts"), default=0)
    return max(round_up(chunking.size(offload.layer_bytes)), largest)


def check_hosted(plan: NodePlan, budget: Budget, tables: Tables | None = None) -> None:
    """Refuse batches on a node that streams weights from disk, which it would read again for every micro-batch.

    Raises:
        PlanError: if `budget` streams weights; names the memory that would suffice.
    """
    if budget.placement.streamed_bytes:
        needed = need(plan, tables)
        least = -(-sufficient_budget(needed, sum(needed.blocks), plan.options.prefill_tokens) >> 20)
        raise PlanError(
            "a node without an accelerator would read weights from disk for every micro-batch of --pipeline batch; "
            f"give it --memory {least}MiB, or less of the model with --split"
        )


def refusal(plan: NodePlan, machine: NodeMachine, options: OffloadOptions) -> str:
    """Return an error message if this node and its flags rule out batches; empty if batches are possible."""
    if why := several_cards(machine):
        return why
    if flag := _idle(plan, options):
        return (
            f"--{flag} has no effect with --pipeline batch, which computes every step layer by layer; "
            "leave out one of the two"
        )
    return ""


def several_cards(machine: NodeMachine) -> str:
    """Return an error message if the machine has several accelerators, since batches use one; empty otherwise."""
    if not machine.more:
        return ""
    return (
        "a node computes a batch on one accelerator, and this one has several; start one worker for each "
        "of them (on the master's machine, --pipeline batch does that)"
    )


def batches_allowed(plan: NodePlan, machine: NodeMachine, options: OffloadOptions) -> bool:
    """Return True if batches are possible and the user left the choice of the pipeline open."""
    return options.pipeline == "auto" and not refusal(plan, machine, options)


def _idle(plan: NodePlan, options: OffloadOptions) -> str:
    """Return the name of a flag that the user gave and that has no effect on batches; empty if there is none."""
    if options.crossover is not None:
        return "crossover"
    return "window" if plan.options.window else ""


def buffer_pages(plan: NodePlan, micro_batch: int) -> int:
    """Return the largest number of KV pages that one micro-batch may have, the same on all nodes of a group.

    They are enough for `micro_batch` sequences of the expected length, and for one of the greatest length.
    """
    usual, longest = pages_for(plan.options.request.tokens), pages_for(plan.options.context)
    return min(plan.options.pages, max(micro_batch * usual, longest + 1))


def problem_of(case: Case) -> BatchProblem:
    """Return the input of the roofline model for the node that `case` describes."""
    assert case.machine is not None  # the roofline model compares its speeds
    return batch_problem(case.plan, case.machine, case.options, case.tables)


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
        head_work(plan, demand.head),
        _limits(options, agreed, used, max(1, plan.kv_heads)),
        -(-plan.options.pages // each),
        passing,
    )


def _within_blocks(machine: NodeMachine, plan: NodePlan) -> NodeMachine:
    """Return the machine with the memory that a plan for batches may use.

    The host's memory is at most `--memory`. A memory that host and accelerator share is halved. On the accelerator, six
    pages of memory per block are left free, because sizes of pieces are rounded up to pages.
    """
    device, memory = machine.accelerator, plan.options.memory or machine.memory
    if device is not None:
        room = min(device.memory, memory // 2) if device.shared else device.memory  # a shared memory is halved
        memory -= room if device.shared else 0
        device = replace(device, memory=max(0, room - PAGE * 6 * len(plan.blocks)))
    return replace(machine, accelerator=device, memory=memory)


def _limits(options: OffloadOptions, agreed: GroupBatch | None, machine: NodeMachine, kv_heads: int) -> PolicyLimits:
    sizes = (agreed.micro_batches, agreed.batch) if agreed else (None, None)
    if machine.accelerator is None:  # without an accelerator all is in host memory: `check_hosted`
        return PolicyLimits(False, False, "ram", "ram", 1, *sizes)
    return PolicyLimits(None, True, options.weights_tier, options.kv_tier, kv_heads, *sizes)


def prompt_chunk(plan: NodePlan, machine: NodeMachine) -> int:
    """Return the largest number of prompt tokens in a micro-batch.

    Starting from the longest step, the number is halved until the activations of so many tokens take at most 1/8 of the
    accelerator's memory, or of the host's memory without an accelerator.
    """
    chunk, token = min(plan.options.prefill_tokens, LONGEST_CHUNK), computing_bytes(plan)
    room = machine.accelerator.memory if machine.accelerator else machine.memory
    while chunk > 1 and chunk * token > room // _CHUNK_SHARE:
        chunk //= 2
    return chunk
