"""Memory that a node needs for its part of a plan, and its division among the uses of memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from allreduce.algorithms.shared import board_bytes
from allreduce.base import arrays_to_sum
from scheduler.budget import PROCESS, Budget, MemoryNeed, plan_budget
from scheduler.free import default_budget
from scheduler.model.placement import Speeds
from tpi.config import ModelConfig
from tpi.devices.pages import PAGE
from tpi.errors import PlanError
from tpi.kernels.kv import LEAST_STATES, PAGES_PER_STATE, page_bytes
from tpi.kernels.memory import CardMemoryNeed, buffer_bytes, card_memory_need, slice_bytes
from tpi.pack.blockfile import BlockShape
from tpi.pack.layout import GROUP, BlockKind
from tpi.stateheads import spread_norm
from tpi.system.machine import usable_cores
from tpi.trace import TRACE_BYTES
from worker.node_plan import NodePlan
from worker.plan.segments import NodeSegment, tiles

_EVERYTHING = 1 << 60  # bytes: without a scheduler, memory is not limited
_SAMPLING = 8  # arrays that sampling needs at once, each with one value per token of the vocabulary


@dataclass(frozen=True)
class Tables:
    """Bytes of the tables and predictors that only the master holds."""

    head: int = 0
    embedding: int = 0  # 0 if it shares the head's table
    predictor_bytes: int = 0  # predictors of other nodes' neurons
    per_layer: int = 0  # memory for the per-layer embeddings (`per_layer_bytes`); their table stays on disk


def per_layer_bytes(table: BlockShape, projection: BlockShape) -> int:
    """Return the bytes of memory that the master needs for the per-layer embeddings.

    In memory are the whole projection, and one unit of the table at a time. The table stays on disk.
    """
    return projection.run("row").nbytes + table.run("row").unit_bytes + 4 * PAGE


@dataclass(frozen=True)
class HostShare:
    """The weights and the KV cache that a node keeps outside its accelerators: in the host's memory or on its disk.

    `sizes` (bytes of memory) and `kinds` have one item per piece, in the order in which pieces are used.
    """

    sizes: tuple[int, ...]
    kinds: tuple[BlockKind, ...]
    kv_layers: int | None = None  # layers with keys and values in host memory; None means all
    staging_bytes: int = 0  # bytes of buffers that collect data for a device
    kv_heads: int | None = None  # KV heads per layer with keys and values in host memory; None means all

    @classmethod
    def of(
        cls,
        pieces: Sequence[NodeSegment],
        sizes: Sequence[int],
        kv_layers: int | None = None,
        staged: int = 0,
        kv_heads: int | None = None,
    ) -> "HostShare":
        """Describe `pieces`, which take `sizes` bytes of memory. The other arguments are attributes of the result."""
        return cls(tuple(sizes), tuple(piece.block.half for piece in pieces), kv_layers, staged, kv_heads)


def fit(
    node: NodePlan, tables: Tables | None = None, hosted: HostShare | None = None, speeds: Speeds | None = None
) -> Budget:
    """Divide `node.options.memory` among the uses of memory on `node`.

    A memory of 0 stands for the free memory of this machine less a margin, or for no limit without a scheduler. So a
    plan for another machine must have the options that `worker.profile.limit_options` returns.

    Args:
        tables: tables and predictors, on the master.
        hosted: the pieces that the host holds; by default all, each with the most memory that it can take.
        speeds: measured speeds for the placement of blocks. They do not change whether the plan fits.

    Raises:
        PlanError: if it does not fit; names the memory that would suffice.
    """
    options, resident = node.options, node.options.scheduler == "resident"
    total = options.memory or (_EVERYTHING if resident else default_budget())
    wanted = need(node, tables, hosted)
    budget = plan_budget(wanted, total, options.prefill_tokens, options.window, options.retain, speeds)
    if resident and budget.placement.streamed_bytes:
        raise PlanError(
            f"{sum(wanted.blocks) >> 20}MiB of weights do not fit into {total >> 20}MiB of memory, all that this node "
            "may use; leave --no-scheduler out, or give this node less with --split"
        )
    return budget


def need(node: NodePlan, tables: Tables | None = None, hosted: HostShare | None = None) -> MemoryNeed:
    """Return how many bytes `node` needs for each use of memory.

    Args:
        node: the node's part of the deployment.
        tables: tables and predictors, on the master.
        hosted: the pieces that the host holds; by default all.
    """
    config, options = node.config, node.options
    tables, pieces = tables or Tables(), tiles(node)
    hosted = hosted or HostShare.of(pieces, [one.max_bytes(node.rank) for one in pieces])
    states = 4 * sum(node.state_sizes.values())
    token, chunk = computing_bytes(node), 0
    if options.batch is not None:  # only one chunk of a step is computed at once; the other tokens wait
        token, chunk = passing_bytes(node), options.batch.chunk * token
    return MemoryNeed(
        blocks=hosted.sizes,
        kinds=hosted.kinds,
        page_bytes=_page_bytes(node, hosted) - (-states // PAGES_PER_STATE),
        pages=options.pages,
        token=token,
        fixed=_fixed(node)
        + LEAST_STATES * states
        + chunk
        + hosted.staging_bytes
        + tables.predictor_bytes
        + tables.per_layer
        + (4 * _SAMPLING * config.vocab if tables.head else 0),
        head=tables.head,
        embedding=tables.embedding,
    )


def _page_bytes(node: NodePlan, hosted: HostShare) -> int:
    """Return the bytes of host memory that one KV page takes in all layers together.

    Layers may have different numbers of heads only if the host holds the keys and values of all of them.
    """
    dtype = node.options.kv_dtype
    if hosted.kv_layers is None and hosted.kv_heads is None:
        return sum(page_bytes(1, each.kv_heads, each.head_dim, dtype) for each in node.layer_heads.values())
    layers = len(node.layer_heads) if hosted.kv_layers is None else hosted.kv_layers
    kv_heads = node.kv_heads if hosted.kv_heads is None else hosted.kv_heads
    return page_bytes(layers, kv_heads, node.config.head_dim, dtype)


def computing_bytes(node: NodePlan) -> int:
    """Return the bytes of activations of one token while `node` computes it, in the layer that needs most."""
    config, neurons, passing = node.config, node.neurons, _passing(node)
    layers = {each: config.at_layer(layer) for layer, each in node.layer_heads.items()}  # one of each kind
    most = (token_bytes(own, each.heads, each.kv_heads, neurons, passing) for each, own in layers.items())
    return max(most, default=token_bytes(config, 0, 0, neurons, passing))


def passing_bytes(node: NodePlan) -> int:
    """Return the bytes that a token takes while it waits until its micro-batch is computed.

    These are copies of its hidden state: in the step, in the micro-batch, in the result, and in transit between nodes.
    """
    return 4 * node.config.hidden * (3 + _passing(node))


def token_bytes(config: ModelConfig, heads: int, kv_heads: int, neurons: int, passing: int = 0) -> int:
    """Return an upper bound of the bytes that one token's activations take on a node.

    Several float32 arrays of `config.hidden` values exist at once, in addition to the kernels' buffers. They are the
    step's input, x, two partial results, normed x, and `passing` others.

    Args:
        heads: query heads of the node.
        kv_heads: KV heads of the node.
        neurons: feed-forward neurons of the node that a token passes.
        passing: number of arrays in transit between tiles and nodes.
    """
    # a message, its frame and the part of a micro-batch have the embeddings of all layers
    embeddings = 4 * 3 * config.per_layer_values
    return 4 * config.hidden * (5 + passing) + embeddings + buffer_bytes(config, heads, kv_heads, neurons)


def kernel_room(node: NodePlan) -> CardMemoryNeed:
    """Return the memory that the kernels of an accelerator need if it computes all blocks of `node`."""
    vectors = sum(
        block.vectors_bytes for block in node.blocks if block.kind != "experts"
    )  # the host has those of experts
    vectors += 4 * len(node.config.inv_freq) * len(node.layers)
    runs = [run.layout for block in node.blocks for run in block.runs]
    return card_memory_need(node.config, (node.heads, node.kv_heads, node.neurons), runs, node.options.context, vectors)


def _passing(node: NodePlan) -> int:
    """Return how many arrays as large as a step's hidden states x exist in addition to those of computing.

    They are the buffers of sums, a partial result if blocks are cut into tiles, and messages with x. The master queues
    x for each worker until the first sum. A worker has the frame that ZeroMQ received, and a copy. Between stages x is
    sent, or received, as a copy and as a frame.
    """
    tiled = len(tiles(node)) > len(node.blocks)
    sums = arrays_to_sum(node.collective, len(node.group)) + tiled + 2 * (not node.whole)
    if node.config.parallel_experts:  # such sums are twice as long, and are put together from two arrays
        sums = 2 * sums + 4
    if spread_norm(node.config) is not None:  # sums of squares follow, and the rows are put together
        sums += -(-sums * GROUP // node.config.hidden) + 1
    return sums + 2 if node.rank else max(sums, node.size - 1)


def _fixed(node: NodePlan) -> int:
    """Return the bytes that do not depend on a step's length.

    They are the process, the kernels' slices, vectors, predictors, the shared board, the trace and hashes.
    """
    vectors = sum(block.vectors_bytes for block in node.blocks)
    board = board_bytes(len(node.group)) if node.collective == "shared" else 0
    trace = TRACE_BYTES if node.options.trace else 0
    compared = node.options.verify_weights
    hashes = sum(len(run.hashes) for block in node.blocks for run in block.runs) if compared else 0
    scratch = slice_bytes(node.config.hidden, node.options.threads or usable_cores())
    return PROCESS + scratch + vectors + node.predictor_bytes + board + trace + hashes
