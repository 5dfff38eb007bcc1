"""The input of a plan for one node with a whole model, from the model's shape, a machine and the flags."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from master.options import DEFAULT_CONTEXT
from master.planning.shapes import ModelShape
from scheduler.model.machine import NodeMachine
from scheduler.model.offload.problem import Problem
from scheduler.model.offload.work import Workload
from scheduler.model.sizes import LONGEST_CHUNK
from tpi.config import RECURRENT, ModelConfig
from tpi.devices.options import OffloadOptions
from tpi.errors import UsageError
from tpi.kernels.kv import KvDtype, pages_for
from tpi.net.messages import NodeOptions, StagePlan, VectorPlan
from tpi.pack.blockfile import BlockShape
from tpi.partition import Range
from worker.node_plan import NodeBlock, NodeLayer, NodePlan, RunUnits
from worker.plan.case import Case
from worker.plan.fit import Tables, per_layer_bytes
from worker.plan.segments import NodeSegment, tile_size

_MOST_SEGMENTS = 256  # limit of segments in a plan, so that planning takes a fraction of a second
_PROMPT, _ANSWER = 512, 128  # default tokens of a prompt and an answer


def planning_case(
    shape: ModelShape,
    machine: NodeMachine,
    request: Workload,
    options: OffloadOptions | None = None,
    kv_dtype: KvDtype | None = None,
) -> Case:
    """Return the input for a node's planner if the node, `machine`, has all blocks of the model, and its tables."""
    asked = NodeOptions(
        context=request.context,
        pages=request.sequences * pages_for(request.context),
        kv_dtype=kv_dtype or default_kv(shape),
        prefill_tokens=LONGEST_CHUNK,
        memory=machine.memory,
        scheduler="window",
    )
    plan = NodePlan(
        session=0,
        epoch=0,
        rank=0,
        size=1,
        config=shape.config,
        layers=tuple(_layers(shape)),
        stages=(StagePlan(0, shape.config.layers, (0,)),),
        peers=(),
        collective="loopback",
        wire="f32",
        options=asked,
        routing=shape.routing,
    )
    head, embedding = block_bytes(shape.head), block_bytes(shape.embedding)
    return Case(
        plan,
        machine,
        options or OffloadOptions(),
        Tables(
            head,
            0 if shape.config.tied else embedding,
            per_layer=per_layer_bytes(*shape.per_layer) if shape.per_layer else 0,
        ),
        request=request,
        coarse=coarse_pieces(plan),
    )


def planning_problem(
    shape: ModelShape, machine: NodeMachine, request: Workload, options: OffloadOptions | None, kv_dtype: KvDtype | None
) -> Problem:
    """Return the cost model's problem of placing all blocks of the model, and its tables, on `machine`."""
    case = planning_case(shape, machine, request, options, kv_dtype)
    return case.problem(case.pieces, case.rounding_bytes(case.pieces))


def coarse_pieces(plan: NodePlan) -> list[NodeSegment]:
    """Return the segments of a plan in order of use, about as large as an attention block, larger if there are many."""
    parts = ffn_parts(plan.blocks)
    return [piece for block in plan.blocks for piece in _cut(block, parts)]


def ffn_parts(blocks: Sequence[NodeBlock]) -> int:
    """Return the number of pieces to cut each FFN block into: pieces about as large as an attention block.

    In a model with many blocks the number is smaller, so that planning stays quick.
    """
    attention = [block.nbytes for block in blocks if block.half == "attention"]
    ffn = [block.nbytes for block in blocks if block.half == "ffn"]
    alike = round(max(ffn, default=0) / tile_size(min(attention, default=1)))
    quick = (_MOST_SEGMENTS - len(attention)) // max(1, len(ffn))
    return max(1, min(alike, quick))


def block_bytes(shape: BlockShape) -> int:
    """Return the bytes of a block's units, which are loaded as needed. Vectors and hashes do not count."""
    return sum(run.units * run.unit_bytes for run in shape.runs)


def layer_blocks(shape: ModelShape) -> list[range]:
    """Return the numbers of each layer's blocks.

    A layer begins with its attention, or with the block in place of attention.
    """
    mixers = {"attention", *RECURRENT}
    starts = [number for number, each in enumerate(shape.blocks) if each.kind in mixers or not number]
    return [range(first, last) for first, last in pairwise([*starts, len(shape.blocks)])]


def _layers(shape: ModelShape) -> Iterator[NodeLayer]:
    for layer, numbers in enumerate(layer_blocks(shape)):
        yield NodeLayer(layer, tuple(replace(_block(at, shape.blocks[at]), layer=layer) for at in numbers))


def _block(number: int, shape: BlockShape) -> NodeBlock:
    runs = tuple(RunUnits(run, Range(0, run.units), b"") for run in shape.runs)
    return NodeBlock(number, 0, shape.kind, number, runs, tuple(VectorPlan(*vector) for vector in shape.vectors))


def _cut(block: NodeBlock, parts: int) -> Iterator[NodeSegment]:
    if block.half != "ffn" or len(block.runs) > 1:
        yield NodeSegment(block, block.runs)
        return
    (run,) = block.runs
    units = len(run.units)
    for first, last in pairwise(units * part // parts for part in range(parts + 1)):
        yield NodeSegment(block, (run.cut(Range(first, last)),))


def request_of(
    config: ModelConfig, prompt: int | None, answer: int | None, sequences: int, context: int | None
) -> Workload:
    """Return the request to plan for. By default the prompt has 512 tokens and the answer 128, less in a short context.

    Raises:
        UsageError: if the context exceeds the model's, or a prompt with its answer exceeds the context.
    """
    longest = config.context
    if context is not None and context > longest:
        raise UsageError(f"-c {context} is over the {longest} tokens that this model was made for; give a smaller -c")
    room = context or min(DEFAULT_CONTEXT, longest)
    asked = prompt or max(1, min(_PROMPT, room // 2)), answer or max(1, min(_ANSWER, room // 4))
    if sum(asked) > room:
        raise UsageError(
            f"{asked[0]} tokens of a prompt and {asked[1]} of an answer do not fit into a context of {room}; give a "
            "larger -c, or a smaller --prompt-tokens or --gen-tokens"
        )
    return Workload(*asked, sequences, room)


def default_kv(shape: ModelShape) -> KvDtype:
    """Return the default format of keys and values: f32 if the weights are f32, else f16."""
    formats = {part.format for block in shape.blocks for run in block.runs for part in run.parts}
    return "f32" if formats == {"f32"} else "f16"
