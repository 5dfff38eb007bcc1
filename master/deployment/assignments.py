"""One `Assign` per rank, made from the planner's shards: which units of which block, with their hashes."""

from collections.abc import Iterator, Sequence
from hashlib import sha256

from master.workers.predictors import SentPredictors
from master.workers.weights import vectors_bytes
from tpi.errors import ModelError
from tpi.net.messages import Assign, BlockPlan, LayerPlan, NodeOptions, PeerAddress, RunPlan, VectorPlan
from tpi.pack.blockfile import BlockShape
from tpi.pack.layout import RunLayout
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
    predictors: SentPredictors | None = None,
) -> list[Assign]:
    """Return one `Assign` per shard, in rank order; rank 0 is the master. None includes embedding, head or final norm.

    `predictors` are for nodes that compute only active neurons: each node gets the rows of its own neurons.
    """
    experts = pack.config.mixture.experts if pack.config.mixture else 1
    hashed = {block.id: _HashedBlock(block, experts) for block in pack.walk()}
    layouts = list(dict.fromkeys(run for block in hashed.values() for run in block.block.shape.runs))
    index = {identity: number for number, identity in enumerate(hashed)}
    everyone = tuple(range(len(shards)))
    routing = _routing(pack)
    layers = tuple(LayerPlan(tuple(index[block.id] for block in blocks), everyone) for blocks in pack.layers)
    sent = predictors or SentPredictors({})
    sent.vectors = {}  # a source that still sends an earlier plan's keeps the old dictionary alive
    foretold = [sent.plans(shard, len(hashed)) for shard in shards]
    return [
        Assign(
            session=session,
            epoch=epoch,
            rank=rank,
            size=len(shards),
            config=pack.config.for_context(options.context),
            layouts=tuple(layouts),
            blocks=(*(block.plan(shard, layouts) for block in hashed.values()), *foretold[rank][0]),
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


class _HashedBlock:
    """The hashes and vectors of one distinct block, read once for all ranks."""

    def __init__(self, block: PackBlock, experts: int) -> None:
        self.block = block
        self._experts = experts
        self._hashes = {run.name: block.unit_hashes(run.name) for run in block.shape.runs}
        self._vectors = sha256(vectors_bytes(block)).digest()

    def plan(self, shard: Shard, layouts: Sequence[RunLayout]) -> BlockPlan:
        """Return the plan of this block for the node that has `shard`."""
        runs = []
        for run, part in held_units(self.block.shape, shard, self._experts):
            hashes = self._hashes[run.name][part.first : part.last].tobytes()
            runs.append(RunPlan(layouts.index(run), part.first, part.last, hashes))
        vectors = tuple(VectorPlan(name, length) for name, length in self.block.shape.vectors)
        return BlockPlan(bytes.fromhex(self.block.id), self.block.kind, tuple(runs), vectors, self._vectors)


def held_units(shape: BlockShape, shard: Shard, experts: int) -> Iterator[tuple[RunLayout, Range]]:
    """Yield the units that `shard` has of each run, as ranges.

    A node's slices of several experts are several ranges. The latent run, from which all heads are computed, belongs to
    every node with a query head.
    """
    ranges: dict[str, Range] = {"query": shard.query, "kv": shard.kv, "neuron": shard.ffn, "shared": shard.shared}
    for run in shape.runs:
        if shape.kind == "experts" and run.name == "neuron":
            yield from ((run, part) for part in expert_ranges(shard.experts, shard.expert, run.units // experts))
        elif run.name == "latent":
            yield run, Range(0, run.units if len(shard.query) else 0)
        else:
            yield run, ranges[run.name]
