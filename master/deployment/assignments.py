"""One `Assign` per rank, made from the planner's shards: which units of which block, with their hashes."""

from collections.abc import Iterator, Sequence
from hashlib import sha256

from master.workers.predictors import PredictorSource
from master.workers.weights import vectors_bytes
from tpi.errors import ModelError
from tpi.net.messages import Assign, BlockPlan, LayerPlan, NodeOptions, PeerAddress, RunPlan, VectorPlan
from tpi.pack.blockfile import BlockShape
from tpi.pack.layout import WHOLE_RUNS, RunLayout
from tpi.pack.reader import Pack, PackBlock
from tpi.pack.routing import NAME, load_routing
from tpi.partition import Range, Shard, expert_ranges
from tpi.progress import warn


def assignments(
    pack: Pack,
    shards: Sequence[Shard],
    peers: Sequence[PeerAddress],
    options: NodeOptions,
    session: int,
    epoch: int,
    collective: str = "star",
    wire: str = "f32",
    predictors: PredictorSource | None = None,
) -> list[Assign]:
    """Return one `Assign` per shard, in rank order; rank 0 is the master. None includes embedding, head or final norm.

    `predictors` are for nodes that compute only active neurons: each node gets the rows of its own neurons.
    """
    experts = pack.config.mixture.experts if pack.config.mixture else 1
    distinct = list({block.id: block for block in pack.walk()}.values())
    layouts = list(dict.fromkeys(run for block in distinct for run in block.shape.runs))
    index = {block.id: number for number, block in enumerate(distinct)}
    full_heads = {block.id: pack.config.has_full_heads(layer) for layer, own in enumerate(pack.layers) for block in own}
    of_kind = {full: [shard.at_layer(full) for shard in shards] for full in (False, True)}
    plans = [_block_plans(block, of_kind[full_heads[block.id]], layouts, experts) for block in distinct]
    everyone = tuple(range(len(shards)))
    routing = _routing(pack)
    layers = tuple(LayerPlan(tuple(index[block.id] for block in blocks), everyone) for blocks in pack.layers)
    sent = predictors or PredictorSource({})
    sent.vectors = {}  # a worker may still be sent the vectors of an earlier plan, from the old dictionary
    foretold = [sent.plans(shard, len(distinct)) for shard in shards]
    return [
        Assign(
            session=session,
            epoch=epoch,
            rank=rank,
            size=len(shards),
            config=pack.config.for_context(options.context),
            layouts=tuple(layouts),
            blocks=(*(plan[rank] for plan in plans), *foretold[rank][0]),
            layers=layers,
            peers=tuple(peers),
            collective=collective,
            wire=wire,
            options=options,
            routing=routing,
            predictors=foretold[rank][1],
        )
        for rank, shard in enumerate(shards)
    ]


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
    """Return a block's plan for the node of each shard. Read the block's hashes and vectors once for all of them."""
    hashes = {run.name: block.unit_hashes(run.name) for run in block.shape.runs}
    vectors = tuple(VectorPlan(name, length) for name, length in block.shape.vectors)
    digest = sha256(vectors_bytes(block)).digest()

    def runs(shard: Shard) -> Iterator[RunPlan]:
        for run, part in held_units(block.shape, shard, experts):
            yield RunPlan(layouts.index(run), part.first, part.last, hashes[run.name][part.first : part.last].tobytes())

    return [BlockPlan(bytes.fromhex(block.id), block.kind, tuple(runs(shard)), vectors, digest) for shard in shards]


def held_units(shape: BlockShape, shard: Shard, experts: int) -> Iterator[tuple[RunLayout, Range]]:
    """Yield the units that `shard` has of each run, as ranges. The shard is that of the block's layer.

    A node's slices of several experts are several ranges. The runs from which all heads are computed belong to every
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
