"""The cost model's problem for one node alone, made from a model's shape, a machine and the flags."""

from collections.abc import Sequence

from master.options import DEFAULT_CONTEXT
from master.planning.shapes import ModelShape
from scheduler.budget import PROCESS, TILE
from scheduler.model.machine import NodeMachine
from scheduler.model.offload.memory import Needs
from scheduler.model.offload.problem import Limits, Problem
from scheduler.model.offload.work import Workload, half_of, unit_bytes, work_of
from tpi.config import ModelConfig
from tpi.errors import UsageError
from tpi.kernels.memory import CardMemoryNeed, card_memory_need, neurons_passed, slice_bytes
from tpi.kv import KvDtype
from tpi.pack.blockfile import BlockShape
from tpi.system.machine import usable_cores
from worker.plan.fit import token_bytes
from worker.plan.segments import tile_size

_PASSING = 1  # arrays as large as x that pass between segments
_MOST_SEGMENTS = 256  # for so many, plans are made in a fraction of a second
_F32 = 4
_PROMPT, _ANSWER = 512, 128  # tokens
_SAMPLING = 8  # arrays with a value for each token of the vocabulary, as in `worker.plan.fit`


def planning_problem(
    shape: ModelShape, machine: NodeMachine, request: Workload, limits: Limits, kv_dtype: KvDtype | None
) -> Problem:
    """Return the problem of placing all blocks of the model, and its tables, on `machine`."""
    config = shape.config
    work = work_of(config, shape.blocks, kv_dtype or default_kv(shape), shape.head, ffn_parts(shape.blocks))
    token = token_bytes(config, config.heads, config.kv_heads, neurons_passed(config), _PASSING)
    return Problem(work, machine, request, Needs(token, _fixed(shape), _there(shape, request)), limits)


def _there(shape: ModelShape, request: Workload) -> CardMemoryNeed:
    """Return the room that the accelerator needs, calculated as by `worker.plan.fit.kernel_room`."""
    config = shape.config
    vectors = sum(_F32 * length for block in shape.blocks if block.kind != "experts" for _, length in block.vectors)
    vectors += _F32 * len(config.inv_freq) * config.layers
    units = config.heads, config.kv_heads, neurons_passed(config)
    return card_memory_need(
        config, units, [run for block in shape.blocks for run in block.runs], request.context, vectors
    )


def ffn_parts(blocks: Sequence[BlockShape]) -> int:
    """Return how many segments an FFN block is cut into: about as large as attention's, but few, to plan quickly."""
    attention = [unit_bytes(block) for block in blocks if block.kind == "attention"]
    ffn = [unit_bytes(block) for block in blocks if half_of(block) == "ffn"]
    alike = round(max(ffn, default=0) / tile_size(min(attention, default=1)))
    quick = (_MOST_SEGMENTS - len(attention)) // max(1, len(ffn))
    return max(1, min(alike, quick))


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


def _fixed(shape: ModelShape) -> int:
    """Return the bytes that any placement needs: the process, vectors, sampling, rows of the embedding."""
    vectors = sum(_F32 * length for block in shape.blocks for _, length in block.vectors)
    sampling = _F32 * _SAMPLING * shape.config.vocab
    rows = 0 if shape.config.tied else min(TILE, unit_bytes(shape.embedding))
    return PROCESS + slice_bytes(shape.config.hidden, usable_cores()) + vectors + sampling + rows
