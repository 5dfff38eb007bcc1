"""Does a node's part of a plan fit into its memories? Asked by the master before weights move, and by the node."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from allreduce.algorithms.shared import board_bytes
from allreduce.base import arrays_to_sum
from scheduler.budget import PROCESS, Budget, Demand, plan_budget
from scheduler.free import default_budget
from scheduler.model.placement import Speeds
from tpi.config import ModelConfig
from tpi.errors import PlanError
from tpi.kernels.memory import CardRoom, buffer_bytes, card_room, slice_bytes
from tpi.kv import page_bytes
from tpi.net.fields import Card
from tpi.pack.layout import BlockKind
from tpi.system.machine import usable_cores
from tpi.trace import TRACE_BYTES
from worker.plan.node_plan import NodePlan
from worker.plan.segments import NodeSegment, tiles

_EVERYTHING = 1 << 60  # bytes: with the scheduler off, memory is no limit
_SAMPLING = 8  # arrays of one value per token of the vocabulary that sampling has at once


@dataclass(frozen=True)
class Tables:
    """Bytes of what only the master has: tables, of which the embedding may be the head's and 0, and what it sends."""

    head: int = 0
    embedding: int = 0
    sent: int = 0  # predictors of other nodes' neurons


@dataclass(frozen=True)
class Hosted:
    """What of a node's part lies in the host's memory or comes from its disk, piece by piece in order of use."""

    sizes: tuple[int, ...]  # bytes of memory of each
    kinds: tuple[BlockKind, ...]
    kv_layers: int | None = None  # of which keys and values live there; None: of all
    staged: int = 0  # bytes that what goes to a device is gathered in
    kv_heads: int | None = None  # of which keys and values live there; None: of all

    @classmethod
    def of(
        cls,
        pieces: Sequence[NodeSegment],
        sizes: Sequence[int],
        kv_layers: int | None = None,
        staged: int = 0,
        kv_heads: int | None = None,
    ) -> "Hosted":
        """Pieces of these sizes, and the keys and values of so many layers and heads."""
        return cls(tuple(sizes), tuple(piece.block.half for piece in pieces), kv_layers, staged, kv_heads)


def fit(
    node: NodePlan, tables: Tables | None = None, hosted: Hosted | None = None, speeds: Speeds | None = None
) -> Budget:
    """What fits into `node.options.memory` (0: what is free here, less a margin; without scheduler, no limit).

    What the options leave open is decided for this machine: ask of another node's plan with its `limited` options.

    Args:
        tables: what the master holds beside its shard.
        hosted: what the host has of it; by default everything, at the most memory that it can take.
        speeds: for which blocks are placed; what fits does not depend on them.

    Raises:
        PlanError: if it does not fit; says what would.
    """
    options, resident = node.options, node.options.scheduler == "resident"
    total = options.memory or (_EVERYTHING if resident else default_budget())
    wanted = need(node, tables, hosted)
    budget = plan_budget(wanted, total, options.prefill_tokens, options.window, options.retain, speeds)
    if resident and budget.placement.streamed_bytes:
        raise PlanError(
            f"{total >> 20}MiB of memory, all that this node lends, do not hold its {sum(wanted.blocks) >> 20}MiB of "
            "weights at once; leave --no-scheduler out, or give this node less with --split"
        )
    return budget


def check_memory(plan: NodePlan, tables: Tables | None = None, card: Card | None = None) -> None:
    """Refuse what a node with this accelerator, or none, cannot hold; ask of another's plan with `limited` options.

    Raises:
        PlanError: if it does not fit; names the smallest setting that would do.
    """
    if card is None:
        budget = fit(plan, tables)
        if plan.options.batch is not None:
            from worker.pipelines.group.hosted import check_hosted

            check_hosted(plan, budget, tables)
        return
    from scheduler.model.machine import LAPTOP, laptop_gpu
    from worker.pipelines.decide import check_accelerator

    sizes = (card.memory, *card.more)
    there, *more = (
        replace(laptop_gpu(), memory=size, shared=card.shared) for size in sizes
    )  # what fits does not depend on speeds
    check_accelerator(plan, replace(LAPTOP, accelerator=there, more=tuple(more)), card.options, tables)


def need(node: NodePlan, tables: Tables | None = None, hosted: Hosted | None = None) -> Demand:
    """What `node` asks a node to find room for. Arguments as `fit`."""
    config, options = node.config, node.options
    tables, pieces = tables or Tables(), tiles(node)
    hosted = hosted or Hosted.of(pieces, [one.most_bytes(node.rank) for one in pieces])
    layers = config.layers if hosted.kv_layers is None else hosted.kv_layers
    kv_heads = node.kv_heads if hosted.kv_heads is None else hosted.kv_heads
    token, chunk = computing_bytes(node), 0
    if options.batch is not None:  # a chunk is computed with, the rest of a step waits its turn
        token, chunk = passing_bytes(node), options.batch.chunk * token
    return Demand(
        blocks=hosted.sizes,
        kinds=hosted.kinds,
        page_bytes=page_bytes(layers, kv_heads, config.head_dim, options.kv_dtype),
        pages=options.pages,
        token=token,
        fixed=_fixed(node) + chunk + hosted.staged + tables.sent + (4 * _SAMPLING * config.vocab if tables.head else 0),
        head=tables.head,
        embedding=tables.embedding,
    )


def computing_bytes(node: NodePlan) -> int:
    """What `node` takes for each token that it computes with at once, in bytes."""
    return token_bytes(node.config, node.heads, node.kv_heads, node.neurons, _passing(node))


def passing_bytes(node: NodePlan) -> int:
    """What it takes for a token of a step of micro-batches that it does not compute with just now, in bytes.

    Hidden states: those of the step, of the micro-batch, of the result, and what travels.
    """
    return 4 * node.config.hidden * (3 + _passing(node))


def token_bytes(config: ModelConfig, heads: int, kv_heads: int, neurons: int, passing: int = 0) -> int:
    """Activations of one token of a step, for local head and neuron counts: an upper bound, in bytes.

    Live at once beside the kernels' buffers, in float32, hidden each: the first x, x, two partials, normed x, and
    `passing` arrays on their way between tiles and nodes.
    """
    return 4 * config.hidden * (5 + passing) + buffer_bytes(config, heads, kv_heads, neurons)


def there_bytes(node: NodePlan) -> CardRoom:
    """What the kernels of an accelerator that computes all of `node` have at once."""
    vectors = sum(block.vectors_bytes for block in node.blocks if block.kind != "experts")  # theirs are the host's
    vectors += 4 * len(node.config.inv_freq) * node.config.layers
    runs = [run.layout for block in node.blocks for run in block.runs]
    return card_room(node.config, (node.heads, node.kv_heads, node.neurons), runs, node.options.context, vectors)


def _passing(node: NodePlan) -> int:
    """Arrays as long as x that pass on: a sum's, the frames in which x travels, and a tile's to the next.

    The master's x is queued for each worker until the first sum; a worker has what ZeroMQ received, and its copy.
    """
    tiled = len(tiles(node)) > len(node.blocks)
    sums = arrays_to_sum(node.collective, node.size) + tiled
    return sums + 2 if node.rank else max(sums, node.size - 1)


def _fixed(node: NodePlan) -> int:
    """What does not grow with a step: the process at work, the kernels' slices, vectors and hashes, the trace."""
    vectors = sum(block.vectors_bytes for block in node.blocks)
    board = board_bytes(node.size) if node.collective == "shared" else 0
    trace = TRACE_BYTES if node.options.trace else 0
    compared = node.options.verify_weights
    hashes = sum(len(run.hashes) for block in node.blocks for run in block.runs) if compared else 0
    scratch = slice_bytes(node.config.hidden, node.options.threads or usable_cores())
    return PROCESS + scratch + vectors + node.predictor_bytes + board + trace + hashes
