"""A pack split over simulated nodes: each node's blocks are computed in turn, and partial results are summed."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from master.deployment.assignments import held_units
from master.deployment.planner import deal_shards, units_of
from tests.support.weights.layerends import end_block, layer_embeddings
from tpi.block import Joining, embedded, join, joining, recurrent_spec
from tpi.config import RECURRENT, ModelConfig
from tpi.devices.host import HostDevice
from tpi.kernels import Kernels, open_kernels
from tpi.kernels.kv import KvPages, pages_for
from tpi.kernels.spec import Batch, NormSpec
from tpi.pack.layout import RunLayout
from tpi.pack.reader import Pack, PackBlock
from tpi.partition import Range, Shard
from worker.node.microbatch import MicroBatch
from worker.node.order import COMPUTE, Phase
from worker.node.segment import AttentionSegment, Segment, open_segment

F32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def split_forward(pack: Pack, tokens: Sequence[int], shares: Sequence[float], steps: int = 0) -> F32:
    """Return logits `[tokens, vocab]` of a pack split by `shares`; compute the last `steps` tokens one at a time.

    Raises:
        PlanError: if there are too few units for so many nodes.
    """
    config, kernels = pack.config.for_context(len(tokens)), open_kernels()
    nodes = [_Node(pack, config, shard, len(tokens), kernels) for shard in deal_shards(config, units_of(pack), shares)]
    first = len(tokens) - steps
    parts = [range(first), *(range(at, at + 1) for at in range(first, len(tokens)))]
    return np.concatenate([_step(pack, nodes, kernels, [tokens[at] for at in part], part) for part in parts])


def _step(pack: Pack, nodes: "Sequence[_Node]", kernels: Kernels, tokens: Sequence[int], at: range) -> F32:
    config, positions = pack.config, np.asarray(at, np.int32)
    x = embedded(config, kernels.gather(*_table(pack.embedding), np.asarray(tokens, np.int32)))
    if pack.positions:
        x = x + kernels.gather(*_table(pack.positions), positions + np.int32(config.position_offset))
    embeddings = layer_embeddings(pack, tokens, x, kernels)
    before: tuple[Joining, F32] | None = None
    for number, (layer, block) in enumerate((layer, block) for layer, own in enumerate(pack.layers) for block in own):
        partials = _partials(nodes, number, np.ascontiguousarray(x), positions)
        total = np.asarray(np.sum(partials, axis=0), np.float32)
        if how := joining(config, block.kind):
            before = how, total
            continue
        if before is not None:
            total, before = join(before[0], before[1], total), None
        x = end_block(pack, block, layer, kernels, x, total, embeddings)
    final = pack.final.vectors()
    norm = NormSpec(config.norm, config.norm_eps, final["norm"], final.get("norm.bias"))
    logits: F32 = kernels.logits(*_table(pack.head), kernels.norm(norm, x))[:, : config.vocab]
    logits = logits * np.float32(config.logit_scale)
    cap = np.float32(config.logit_softcap)
    return np.asarray(np.tanh(logits / cap) * cap, np.float32) if cap else logits


def _partials(nodes: "Sequence[_Node]", number: int, x: F32, positions: npt.NDArray[np.int32]) -> list[F32]:
    """Return every node's partial result of block `number`; sums that heads wait for are computed in between."""
    parts = [node.part(x, positions) for node in nodes]
    waiting = [node.heads(number, part) for node, part in zip(nodes, parts, strict=True)]
    phases = COMPUTE
    if all(segment is not None for segment in waiting):
        phases = frozenset({Phase.ATTEND, Phase.OUTPUT})
        sums = [segment.squares(part) for segment, part in zip(waiting, parts, strict=True) if segment]
        for segment, part in zip(waiting, parts, strict=True):
            assert segment is not None
            segment.finish(part, np.asarray(np.sum(sums, axis=0), np.float32))
    return [node.partial(number, part, phases) for node, part in zip(nodes, parts, strict=True)]


class _Node:
    """One node's segments, their weights, and its keys and values."""

    def __init__(self, pack: Pack, config: ModelConfig, shard: Shard, tokens: int, kernels: Kernels) -> None:
        pages = pages_for(tokens)
        self._pages = np.arange(pages, dtype=np.int32)[None]
        shards = [
            shard.at_layer(config.has_full_heads(layer), config.has_wide_ffn(layer)) for layer in range(config.layers)
        ]
        with_kv = [layer for layer in range(config.layers) if not config.is_recurrent(layer)]
        own = [layer for layer in with_kv if config.kv_layer(layer) == layer]
        heads = {layer: _kv_heads(pack, config, layer, shards[layer]) for layer in own}
        kv = KvPages.of_layers(heads, pages, "f32")
        self._segments = [
            _segment(kernels, config, layer, block, shards[layer], kv, _source(pack, layer, block, shards[layer]))
            for layer, blocks in enumerate(pack.layers)
            for block in blocks
        ]

    def part(self, x: F32, positions: npt.NDArray[np.int32]) -> MicroBatch:
        """Return a micro-batch of a step's tokens, at the input `x` of a block."""
        states = np.array([[0 if positions[0] else -1, 0, 0, 0]], np.int32)
        return MicroBatch(x, Batch(positions, np.zeros_like(positions), self._pages, states))

    def heads(self, number: int, part: MicroBatch) -> AttentionSegment | None:
        """Return the segment of block `number`, heads projected, if they wait for a sum over all nodes; else None."""
        segment, data = self._segments[number]
        if not isinstance(segment, AttentionSegment) or not segment.waits:
            return None
        segment.start(COMPUTE - {Phase.ATTEND, Phase.OUTPUT}, data, part, lambda _: part.x)
        return segment

    def partial(self, number: int, part: MicroBatch, phases: frozenset[Phase]) -> F32:
        """Return this node's partial result of block `number`."""
        segment, data = self._segments[number]
        found = segment.start(phases, data, part, lambda _: part.x)
        assert found is not None
        return found.wait()


def _kv_heads(pack: Pack, config: ModelConfig, layer: int, shard: Shard) -> tuple[int, int]:
    """Return the number of the node's KV heads in a layer, and their size."""
    own, width = config.at_layer(layer), pack.layers[layer][0].run("kv").width
    return len(shard.kv.scaled(width // own.kv_width, own.kv_heads)), own.head_dim


def _segment(
    kernels: Kernels,
    config: ModelConfig,
    layer: int,
    block: PackBlock,
    shard: Shard,
    kv: KvPages,
    source: tuple[RunLayout, Range] | None,
) -> tuple[Segment, Bytes]:
    runs = list(held_units(block.shape, shard, config.mixture.experts if config.mixture else 1))
    data = [block.read_units(run.name, part.first, part.last).reshape(-1) for run, part in runs]
    states = None
    if block.kind in RECURRENT:
        states = np.zeros((1, recurrent_spec(config, runs, block.vectors()).state_values), np.float32)
    vectors = block.vectors()
    segment = open_segment(HostDevice(kernels), config, layer, runs, vectors, kv, states=states, source=source)
    return segment, np.concatenate(data)


def _source(pack: Pack, layer: int, block: PackBlock, shard: Shard) -> tuple[RunLayout, Range] | None:
    """Return the run of keys and values of another block that an attention block reads; None if it has its own."""
    at = pack.config.kv_layer(layer)
    return None if block.kind != "attention" or at == layer else (pack.layers[at][0].run("kv"), shard.kv)


def _table(block: PackBlock) -> tuple[RunLayout, Bytes]:
    run = block.run("row")
    return run, block.read_units("row", 0, run.units).reshape(-1)
