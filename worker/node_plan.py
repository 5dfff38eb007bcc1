"""A node's part of a deployment as the node reads it: layers, their blocks in order of use, the units of each run.

The master sends it as a `tpi.net.messages.Assign`, which lists each distinct block once and refers to blocks by index.
Only this module translates that message.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count

from tpi.config import RECURRENT, ModelConfig
from tpi.kernels.spec import LATER
from tpi.net.fields import DIGEST_BYTES
from tpi.net.messages import Assign, NodeOptions, PeerAddress, PredictorPlan, StagePlan, VectorPlan
from tpi.pack.layout import BlockKind, RunLayout, RunName, recurrent_shapes
from tpi.partition import FFN_UNIT, Range, by_expert


@dataclass(frozen=True)
class RunUnits:
    """Consecutive units of a run.

    Attributes:
        layout: the layout of the whole run.
        units: the range of these units.
        hashes: the digests of these units back to back, `DIGEST_BYTES` each.
    """

    layout: RunLayout
    units: Range
    hashes: bytes

    @property
    def name(self) -> RunName:
        """The name of the run that the units belong to."""
        return self.layout.name

    @property
    def nbytes(self) -> int:
        """Number of bytes of these units."""
        return len(self.units) * self.layout.unit_bytes

    def nbytes_before(self, part: "RunUnits") -> int:
        """Return how many bytes of these units come before `part`, a subrange of them."""
        return (part.units.first - self.units.first) * self.layout.unit_bytes

    def cut(self, units: Range) -> "RunUnits":
        """Return the range `units`, which must lie within these units, with its hashes."""
        first = self.units.first
        hashes = self.hashes[(units.first - first) * DIGEST_BYTES : (units.last - first) * DIGEST_BYTES]
        return replace(self, units=units, hashes=hashes)


HALVES: dict[BlockKind, BlockKind] = {"experts": "ffn", "delta": "attention", "mamba": "attention", "conv": "attention"}


@dataclass(frozen=True)
class NodeBlock:
    """The units that this node has of one block: the attention or the feed-forward half of a layer.

    Attributes:
        number: position in the order in which the block loop uses the blocks, from 0; -1 in `node_blocks`.
        layer: the number of its layer; -1 in `node_blocks`.
        kind: the kind of the block.
        source: index into `Assign.blocks`; blocks with the same content share it.
        runs: the units, back to back in the shard image.
        vectors: norms and biases, which every node holds in full.
        vectors_hash: the SHA-256 of their bytes, back to back.
        id: the block's content address, 32 bytes; empty if only the shape of the model is known.
    """

    number: int
    layer: int
    kind: BlockKind
    source: int
    runs: tuple[RunUnits, ...]
    vectors: tuple[VectorPlan, ...] = ()
    vectors_hash: bytes = b""
    id: bytes = b""

    @property
    def name(self) -> str:
        """The block's name in traces and errors."""
        return f"{self.kind} {self.layer}"

    @property
    def half(self) -> BlockKind:
        """The half of a layer that this block belongs to: "attention" (also for blocks with states), or "ffn"."""
        return HALVES.get(self.kind, self.kind)

    @property
    def nbytes(self) -> int:
        """Bytes of this node's units."""
        return sum(run.nbytes for run in self.runs)

    @property
    def vectors_bytes(self) -> int:
        """Number of bytes of all vectors of the block."""
        return 4 * sum(vector.length for vector in self.vectors)

    def run(self, name: RunName) -> RunUnits:
        """Return the run called `name`.

        Raises:
            KeyError: if the block has no such run.
        """
        return {run.name: run for run in self.runs}[name]


@dataclass(frozen=True)
class NodeLayer:
    """A layer that the node holds: its number in the model, and its blocks in order of use."""

    number: int
    blocks: tuple[NodeBlock, ...]


@dataclass(frozen=True)
class Pass:
    """One pass of a node in a step: the number of the stage, and the range of that stage's block numbers.

    `stage` is None for a node without layers.
    """

    stage: int | None
    blocks: range


@dataclass(frozen=True)
class LayerHeads:
    """A node's numbers of query heads and of KV heads in one layer, and the number of values of a head.

    A layer that reads the keys and values of another has no KV heads.
    """

    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class NodePlan:
    """Everything that the master tells one node about a deployment.

    `session` is a random number of the master's run, and `epoch` counts its deployments.
    """

    session: int
    epoch: int
    rank: int
    size: int
    config: ModelConfig
    layers: tuple[NodeLayer, ...]
    stages: tuple[StagePlan, ...]
    peers: tuple[PeerAddress, ...]
    collective: str
    wire: str
    options: NodeOptions
    routing: bytes = b""  # recorded routing of this model, for `tpi.pack.routing.from_bytes`; empty if there is none
    predictors: tuple[PredictorPlan, ...] = ()
    predictor_bytes: int = 0  # memory of `predictors`

    @cached_property
    def passes(self) -> tuple[Pass, ...]:
        """The passes of this node in a step: one for each of its stages, or a single pass without blocks."""
        found, first = list[Pass](), 0
        for number, stage in enumerate(self.stages):
            if self.rank in stage.ranks:
                last = first + sum(len(one.blocks) for one in self.layers if stage.first <= one.number < stage.last)
                found.append(Pass(number, range(first, last)))
                first = last
        return tuple(found) or (Pass(None, range(0)),)

    @property
    def whole(self) -> bool:
        """True if all nodes hold all layers together, in one stage."""
        return len(self.group) == self.size

    @cached_property
    def group(self) -> tuple[int, ...]:
        """The ranks of the nodes whose partial results are summed with this node's results, in ascending order.

        A node with several passes is the only node of each of its stages.
        """
        stage = self.passes[0].stage
        return (self.rank,) if stage is None else self.stages[stage].ranks

    @cached_property
    def blocks(self) -> tuple[NodeBlock, ...]:
        """All blocks of the node, in the order in which a step uses them."""
        return tuple(block for layer in self.layers for block in layer.blocks)

    def runs(self, name: RunName) -> Iterator[RunUnits]:
        """Return the runs called `name` of every block that has one, in order of use."""
        return (run for block in self.blocks for run in block.runs if run.name == name)

    @cached_property
    def layer_heads(self) -> dict[int, LayerHeads]:
        """The numbers and the size of this node's heads, by layer with attention."""
        return {block.layer: _heads(self.config, block) for block in self.blocks if block.kind == "attention"}

    def kv_source(self, block: NodeBlock) -> tuple[RunLayout, Range] | None:
        """Return the run `kv` of the layer whose keys and values an attention block reads; None if it has its own."""
        layer = self.config.kv_layer(block.layer)
        if block.kind != "attention" or layer == block.layer:
            return None
        run = next(one.blocks[0].run("kv") for one in self.layers if one.number == layer)
        return run.layout, run.units

    @property
    def heads(self) -> int:
        """The largest number of query heads that this node has in one block."""
        return max((each.heads for each in self.layer_heads.values()), default=0)

    @property
    def kv_heads(self) -> int:
        """The largest number of KV heads that this node has in one block."""
        return max((each.kv_heads for each in self.layer_heads.values()), default=0)

    @cached_property
    def state_sizes(self) -> dict[int, int]:
        """The number of float32 values of a sequence's state in each recurrent layer, for this node's heads."""
        return {block.layer: self._state_size(block) for block in self.blocks if block.kind in RECURRENT}

    def _state_size(self, block: NodeBlock) -> int:
        vectors = {name: shape.vectors or 0 for name, shape in recurrent_shapes(self.config)[block.kind].items()}
        held = {run.name: len(run.units.scaled(run.layout.width, vectors[run.name])) for run in block.runs}
        return self.config.state_values(held["value"], held.get("key", 0), LATER)

    @property
    def neurons(self) -> int:
        """The largest number of this node's feed-forward neurons that are computed for one token in one block."""
        return max((self._neurons(block) for block in self.blocks if block.half == "ffn"), default=0)

    def _neurons(self, block: NodeBlock) -> int:
        mixture = self.config.mixture
        if block.kind != "experts" or mixture is None:
            return min(_width(block.runs), self.config.at_layer(block.layer).intermediate)
        routed = [run for run in block.runs if run.name == "neuron"]
        slices = [
            len(part) * run.layout.width
            for run in routed
            for _, part in by_expert(run.units, run.layout.units // mixture.experts)
        ]
        return _width(block.runs) - _width(routed) + mixture.used * max(slices, default=0)


def _heads(config: ModelConfig, block: NodeBlock) -> LayerHeads:
    config, query = config.at_layer(block.layer), block.run("query")
    heads = query.units.scaled(query.layout.width // config.head_dim, config.heads)
    if config.shared_kv:
        return LayerHeads(len(heads), 0, config.head_dim)
    kv = block.run("kv")
    kv_heads = kv.units.scaled(kv.layout.width // config.kv_width, config.kv_heads)
    return LayerHeads(len(heads), len(kv_heads), config.head_dim)


def _width(runs: Sequence[RunUnits]) -> int:
    """Return the number of vectors, for example neurons, in all units of `runs`, counting one part of each run."""
    return sum(len(run.units) * run.layout.width for run in runs)


def node_blocks(assign: Assign) -> list[NodeBlock]:
    """Return the distinct blocks that the node stores, in the order of `Assign.blocks`."""
    return [_block(assign, source) for source in range(len(assign.blocks))]


def node_plan(assign: Assign) -> NodePlan:
    """Return the plan that `assign` carries."""
    numbers, stored = count(), node_blocks(assign)
    layers = [
        NodeLayer(
            layer.number,
            tuple(replace(stored[index], number=next(numbers), layer=layer.number) for index in layer.blocks),
        )
        for layer in assign.layers
    ]
    return NodePlan(
        session=assign.session,
        epoch=assign.epoch,
        rank=assign.rank,
        size=assign.size,
        config=assign.config,
        layers=tuple(layers),
        stages=assign.stages,
        peers=assign.peers,
        collective=assign.collective,
        wire=assign.wire,
        options=assign.options,
        routing=assign.routing,
        predictors=assign.predictors,
        predictor_bytes=sum(_predictor_bytes(one, stored[one.block]) for one in assign.predictors),
    )


def _block(assign: Assign, source: int) -> NodeBlock:
    block = assign.blocks[source]
    runs = (RunUnits(assign.layouts[run.layout], Range(run.first, run.last), run.hashes) for run in block.runs)
    return NodeBlock(-1, -1, block.kind, source, tuple(runs), block.vectors, block.vectors_hash, block.id)


def _predictor_bytes(one: PredictorPlan, block: NodeBlock) -> int:
    """Return the memory of a predictor: as it was sent, plus a copy for computing if that has another form.

    2-byte weights are widened to 4 bytes, and an incomplete last unit is filled up.
    """
    if one.weights == "f16":
        return 3 * block.vectors_bytes
    return (2 if one.neurons % FFN_UNIT else 1) * block.vectors_bytes
