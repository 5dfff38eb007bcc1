"""One `Assign` per rank, made from the stages: which units of which block, with their hashes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

from master.deployment.stages import Stage
from master.workers.predictors import PredictorSource
from master.workers.weights import vectors_bytes
from tpi.config import ModelConfig
from tpi.errors import ModelError, PlanError
from tpi.net.messages import (
    Assign,
    BlockPlan,
    LayerPlan,
    NodeOptions,
    PeerAddress,
    PredictorPlan,
    RunPlan,
    StagePlan,
    VectorPlan,
)
from tpi.pack.blockfile import BlockShape
from tpi.pack.layout import WHOLE_RUNS, RunLayout
from tpi.pack.reader import Pack, PackBlock
from tpi.pack.routing import NAME, load_routing
from tpi.partition import Range, Shard, expert_ranges
from tpi.progress import warn


def assignments(
    pack: Pack,
    stages: Sequence[Stage],
    peers: Sequence[PeerAddress],
    options: NodeOptions,
    session: int,
    epoch: int,
    collective: str = "star",
    wire: str = "f32",
    predictors: PredictorSource | None = None,
) -> list[Assign]:
    """Return one `Assign` per rank; rank 0 is the master. No assignment has the embedding, head or final norm.

    A node gets the layers of its own stages. `predictors` are for nodes that compute only active neurons: each node
    gets the rows of its own neurons.
    """
    layouts = list(dict.fromkeys(run for block in pack.walk() for run in block.shape.runs))
    sent = predictors or PredictorSource({})
    sent.vectors = {}  # a worker may still be sent the vectors of an earlier plan, from the old dictionary
    parts: dict[int, _Part] = {}
    for stage in stages:
        for rank, part in _parts(pack, stage, layouts, sent).items():
            parts[rank] = _joined(parts[rank], part) if rank in parts else part
    routing, idle = _routing(pack), _Part((), (), ())
    return [
        Assign(
            session=session,
            epoch=epoch,
            rank=rank,
            size=len(peers),
            config=pack.config.for_context(options.context),
            layouts=tuple(layouts),
            blocks=parts.get(rank, idle).blocks,
            layers=parts.get(rank, idle).layers,
            stages=tuple(StagePlan(stage.layers.first, stage.layers.last, stage.ranks) for stage in stages),
            peers=tuple(peers),
            collective=collective,
            wire=wire,
            options=options,
            routing=routing,
            predictors=parts.get(rank, idle).predictors,
        )
        for rank in range(len(peers))
    ]


@dataclass(frozen=True)
class _Part:
    """A node's blocks, the layers that refer to these blocks, and the predictors of the node's neurons."""

    blocks: tuple[BlockPlan, ...]
    layers: tuple[LayerPlan, ...]
    predictors: tuple[PredictorPlan, ...]


def _parts(pack: Pack, stage: Stage, layouts: Sequence[RunLayout], sent: PredictorSource) -> dict[int, _Part]:
    """Return the layers and units that each node of `stage` holds, by rank; `sent` has the predictors for it."""
    experts = pack.config.mixture.experts if pack.config.mixture else 1
    numbers = range(stage.layers.first, stage.layers.last)
    distinct: dict[str, tuple[PackBlock, int]] = {}  # blocks by id, each with its first layer
    for number in numbers:
        if pack.config.kv_layer(number) < stage.layers.first:
            raise PlanError(
                f"layer {number} uses the keys and values of layer {pack.config.kv_layer(number)}, which is in another "
                "stage; give --stages 1, or stages in which one stage has both layers"
            )
        distinct |= {block.id: (block, number) for block in pack.layers[number]}
    index = {identity: at for at, identity in enumerate(distinct)}
    plans = [
        _block_plans(block, [_at_layer(pack.config, shard, layer) for shard in stage.shards], layouts, experts)
        for block, layer in distinct.values()
    ]
    layers = tuple(LayerPlan(number, tuple(index[block.id] for block in pack.layers[number])) for number in numbers)
    foretold = [sent.plans(shard, len(distinct)) for shard in stage.shards]
    return {
        rank: _Part((*(plan[at] for plan in plans), *foretold[at][0]), layers, foretold[at][1])
        for at, rank in enumerate(stage.ranks)
    }


def _joined(one: _Part, other: _Part) -> _Part:
    """Return a node's parts of two of its stages as one part; a block that is in both is listed once."""
    blocks = {block.id: block for block in (*one.blocks, *other.blocks)}
    index = {identity: at for at, identity in enumerate(blocks)}
    layers = (LayerPlan(each.number, tuple(index[other.blocks[at].id] for at in each.blocks)) for each in other.layers)
    return _Part(tuple(blocks.values()), (*one.layers, *layers), one.predictors)


def _at_layer(config: ModelConfig, shard: Shard, layer: int) -> Shard:
    return shard.at_layer(config.has_full_heads(layer), config.has_wide_ffn(layer))


def _routing(pack: Pack) -> bytes:
    """Return the recorded expert routing of a profile; empty if there is none, or if it is damaged."""
    if pack.config.mixture is None or not (path := pack.path / NAME).exists():
        return b""
    try:
        return load_routing(path).to_bytes()
    except ModelError as error:
        warn(str(error))
        return b""


def _block_plans(
    block: PackBlock, shards: Sequence[Shard], layouts: Sequence[RunLayout], experts: int
) -> list[BlockPlan]:
    """Return a block's plan for the node of each shard, reading the block's hashes and vectors only once."""
    hashes = {run.name: block.unit_hashes(run.name) for run in block.shape.runs}
    vectors = tuple(VectorPlan(name, length) for name, length in block.shape.vectors)
    digest = sha256(vectors_bytes(block)).digest()

    def runs(shard: Shard) -> Iterator[RunPlan]:
        for run, part in held_units(block.shape, shard, experts):
            yield RunPlan(layouts.index(run), part.first, part.last, hashes[run.name][part.first : part.last].tobytes())

    return [BlockPlan(bytes.fromhex(block.id), block.kind, tuple(runs(shard)), vectors, digest) for shard in shards]


def held_units(shape: BlockShape, shard: Shard, experts: int) -> Iterator[tuple[RunLayout, Range]]:
    """Yield the units that `shard` has of each run of a block, as ranges.

    `shard` is the node's shard of the block's layer. The run of routed experts may have several ranges: the node's
    slice of each of its experts. The runs of latent attention from which all heads are computed are in full on every
    node with a query head.
    """
    ranges: dict[str, Range] = {
        "query_up": shard.query, "query": shard.query, "kv": shard.kv, "value": shard.value, "key": shard.key,
        "neuron": shard.ffn, "shared": shard.shared,
    }  # fmt: skip
    for run in shape.runs:
        if shape.kind == "experts" and run.name == "neuron":
            yield from ((run, part) for part in expert_ranges(shard.experts, shard.expert, run.units // experts))
        elif run.name in WHOLE_RUNS:
            yield run, Range(0, run.units if len(shard.query) else 0)
        else:
            yield run, ranges[run.name]
