"""From a plan to a node that computes: blocks, weight window, KV storage, collective."""

from collections.abc import Iterator, Sequence

from allreduce.base import Endpoints, GroupSpec, Peer, open_group
from scheduler.window import Resident
from tpi import kernels
from tpi.block import Block, attention_block, ffn_block
from tpi.config import ModelConfig
from tpi.kv import PagedKV
from tpi.messages import Assign, BlockPlan, RunPlan
from tpi.partition import Range, Shard
from worker.image import HeldBlock
from worker.node import Node
from worker.shard import Shard as NodeShard


def build_node(assign: Assign, held: Sequence[HeldBlock], endpoints: Endpoints) -> Node:
    """Everything that runs `assign` on this node; `held` are `assign.blocks`, in that order.

    Raises:
        WeightsError: if a shard image cannot be read.
        PlanError: if the node's memory does not hold what the plan asks for.
    """
    if assign.options.threads:
        kernels.set_threads(assign.options.threads)
    used = [index for layer in assign.layers for index in (layer.attention, layer.ffn)]
    blocks = list(_blocks(assign, held))
    window = Resident([held[index].extent for index in used])
    return Node(NodeShard(blocks, window, open_group(assign.collective, _group_spec(assign), endpoints), _kv(assign)))


def local_shard(assign: Assign, layer: int) -> Shard:
    """The units of `layer` that this node holds."""
    attention, ffn = (assign.blocks[index] for index in (assign.layers[layer].attention, assign.layers[layer].ffn))
    ranges = {**_ranges(assign, attention), **_ranges(assign, ffn)}
    return Shard(ranges["query"], ranges["kv"], ranges["neuron"])


def kv_heads(assign: Assign) -> int:
    """KV heads that this node holds; the same for every layer."""
    config, plan = assign.config, assign.blocks[assign.layers[0].attention]
    (width,) = (assign.layouts[run.layout].width for run in plan.runs if assign.layouts[run.layout].name == "kv")
    return len(local_shard(assign, 0).kv.scaled(width // config.head_dim, config.kv_heads))


def _blocks(assign: Assign, held: Sequence[HeldBlock]) -> Iterator[Block]:
    config: ModelConfig = assign.config
    for layer, plan in enumerate(assign.layers):
        shard = local_shard(assign, layer)
        runs = {name: assign.layouts[run.layout] for name, run in _runs(assign, assign.blocks[plan.attention]).items()}
        yield attention_block(config, layer, runs["query"], runs["kv"], held[plan.attention].vectors, shard)
        (neuron,) = (assign.layouts[run.layout] for run in assign.blocks[plan.ffn].runs)
        yield ffn_block(config, layer, neuron, held[plan.ffn].vectors, shard)


def _runs(assign: Assign, plan: BlockPlan) -> dict[str, RunPlan]:
    return {assign.layouts[run.layout].name: run for run in plan.runs}


def _ranges(assign: Assign, plan: BlockPlan) -> dict[str, Range]:
    return {name: Range(run.first, run.last) for name, run in _runs(assign, plan).items()}


def _kv(assign: Assign) -> PagedKV:
    options = assign.options
    return PagedKV.allocate(
        assign.config.layers, options.kv_blocks, kv_heads(assign), assign.config.head_dim, options.kv_dtype
    )


def _group_spec(assign: Assign) -> GroupSpec:
    peers = tuple(Peer(peer.rank, peer.name, peer.address) for peer in assign.peers)
    return GroupSpec(assign.rank, assign.session, assign.epoch, peers, assign.wire, assign.options.timeout_s)
