"""Does a node's part of a plan fit into its memory? Asked by the master before weights move, and by the node itself."""

from collections.abc import Sequence
from dataclasses import dataclass

from allreduce.base import arrays_to_sum
from allreduce.shared import board_bytes
from scheduler.budget import PROCESS, Budget, Need, plan, scratch_bytes, token_bytes
from scheduler.free import default_budget
from scheduler.placement import Speeds
from tpi.kv import block_bytes
from tpi.machine import usable_cores
from tpi.messages import Assign
from tpi.pack.layout import RunLayout
from tpi.partition import FFN_UNIT
from tpi.trace import TRACE_BYTES
from worker.assigned import layouts, local_shard, used_blocks
from worker.tiles import ffn_tiles, tile_bytes

_EVERYTHING = 1 << 60  # bytes: with the scheduler off, memory is no limit
_SAMPLING = 8  # arrays of one value per token of the vocabulary that sampling has at once


@dataclass(frozen=True)
class Tables:
    """Bytes of the tables that only the master has; `embedding` is 0 where it is the head's."""

    head: int = 0
    embedding: int = 0


def fit(
    assign: Assign, tables: Tables | None = None, blocks: Sequence[int] | None = None, speeds: Speeds | None = None
) -> Budget:
    """What fits into `assign.options.memory` (0: what is free here, less a margin).

    What the options leave open is decided for this machine: ask of another node's plan with its `limited` options.

    Args:
        tables: what the master holds beside its shard.
        blocks: bytes of memory of each block or tile in order of use; by default what they take at most.
        speeds: for which blocks are placed; what fits does not depend on them.

    Raises:
        PlanError: if it does not fit; says what would.
    """
    options = assign.options
    total = options.memory or default_budget()
    if options.scheduler == "resident":
        total = _EVERYTHING
    wanted = need(assign, tables, blocks)
    return plan(wanted, total, options.prefill_tokens, options.window, options.retain, speeds)


def need(assign: Assign, tables: Tables | None = None, blocks: Sequence[int] | None = None) -> Need:
    """What `assign` asks a node to find room for. Arguments as `fit`."""
    config, options = assign.config, assign.options
    shard, (query, kv) = local_shard(assign, 0), _attention_layouts(assign)
    heads = len(shard.query.scaled(query.width // config.head_dim, config.heads))
    kv_heads = len(shard.kv.scaled(kv.width // config.head_dim, config.kv_heads))
    neurons = len(shard.ffn.scaled(FFN_UNIT, config.intermediate))
    tables = tables or Tables()
    return Need(
        blocks=tuple(blocks if blocks is not None else tile_bytes(assign)),
        kv_block=block_bytes(config.layers, kv_heads, config.head_dim, options.kv_dtype),
        kv_blocks=options.kv_blocks,
        token=token_bytes(config, heads, kv_heads, neurons, _passing(assign)),
        fixed=_fixed(assign) + (4 * _SAMPLING * config.vocab if tables.head else 0),
        head=tables.head,
        embedding=tables.embedding,
    )


def _passing(assign: Assign) -> int:
    """Arrays as long as x that pass on: a sum's, the frames in which x travels, and a tile's to the next.

    The master's x is queued for each worker until the first sum; a worker has what ZeroMQ received, and its copy.
    """
    tiled = any(len(tiles) > 1 for tiles in ffn_tiles(assign))
    sums = arrays_to_sum(assign.collective, assign.size) + tiled
    return sums + 2 if assign.rank else max(sums, assign.size - 1)


def _fixed(assign: Assign) -> int:
    """What does not grow with a step: the process at work, the kernels' slices, vectors and hashes, the trace."""
    vectors = sum(4 * vector.length for index in used_blocks(assign) for vector in assign.blocks[index].vectors)
    board = board_bytes(assign.size) if assign.collective == "shared" else 0
    trace = TRACE_BYTES if assign.options.trace else 0
    runs = [run for index in used_blocks(assign) for run in assign.blocks[index].runs]
    hashes = sum(len(run.hashes) for run in runs) if assign.options.verify_weights else 0
    scratch = scratch_bytes(assign.config.hidden, assign.options.threads or usable_cores())
    return PROCESS + scratch + vectors + board + trace + hashes


def _attention_layouts(assign: Assign) -> tuple[RunLayout, RunLayout]:
    found = layouts(assign, assign.layers[0].attention)
    return found["query"], found["kv"]
