"""Plan of a pack: the blocks of a model, the format of every part and the layout of every run. Reads no weights."""

from collections.abc import Collection, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Literal, cast

from tpi.config import RECURRENT, SPARSE, Format, ModelConfig
from tpi.errors import ModelError
from tpi.families.base import BlockRefs, Model, Ref
from tpi.pack.blockfile import BlockShape
from tpi.pack.builder.claims import check_all_tensors_used
from tpi.pack.layout import (
    GROUP,
    RECORDS,
    TILE_OUTPUTS,
    Axis,
    BlockKind,
    Part,
    RunLayout,
    RunName,
    attention_parts,
    attention_shapes,
    fewest_heads,
    ffn_units,
    is_quantised,
    kv_unit_heads,
    per_layer_vectors,
    query_unit_heads,
    recurrent_shapes,
    recurrent_vectors,
)
from tpi.partition import FFN_UNIT
from tpi.sources.base import Source, find
from tpi.sources.elements import Element

Dtype = Literal["auto", "f32", "bf16", "q8", "q4", "q4s"]
DTYPES: tuple[Dtype, ...] = ("auto", "f32", "bf16", "q8", "q4", "q4s")

_RUNS: Mapping[BlockKind, Mapping[RunName, tuple[str, ...]]] = {
    "delta": {"value": ("v", "gate", "o"), "key": ("q", "k")},
    "mamba": {"value": ("v", "gate", "o"), "key": ("q", "k")},
    "conv": {"value": ("v", "input", "gate", "o")},
    "ffn": {"neuron": ("gate", "up", "down")},
    "experts": {"shared": ("gate", "up", "down"), "neuron": ("gate", "up", "down")},
}
Pieces = tuple[tuple[tuple[str, Ref], ...], ...]
_AXES: dict[str, Axis] = {"o": "column", "down": "column"}


@dataclass(frozen=True)
class RunRecipe:
    """Layout of a run, and the source matrices that it is made from.

    A run consists of equally large pieces: one for each expert of a block, or a single one. `pieces` has, for each
    piece, the matrix of each part. `vectors` is the number of vectors in a piece before padding.
    """

    layout: RunLayout
    pieces: tuple[tuple[Ref, ...], ...]
    vectors: int

    @property
    def piece(self) -> RunLayout:
        """The layout of one piece."""
        return replace(self.layout, units=self.layout.units // len(self.pieces))


@dataclass(frozen=True)
class BlockRecipe:
    """Plan of one block. Equal recipes result in equal blocks."""

    kind: BlockKind
    runs: tuple[RunRecipe, ...]
    vectors: tuple[tuple[str, Ref, int], ...]  # name, tensor in the source, length in values

    @property
    def shape(self) -> BlockShape:
        """The kind, runs and vectors of the block, as its file has them."""
        vectors = tuple((name, length) for name, _, length in self.vectors)
        return BlockShape(self.kind, tuple(run.layout for run in self.runs), vectors)


@dataclass(frozen=True)
class PackPlan:
    """The plans of all blocks of a model. `head` equals `embedding` if the model's embeddings are tied."""

    layers: tuple[tuple[BlockRecipe, ...], ...]  # the blocks of each layer, in order of use
    embedding: BlockRecipe
    head: BlockRecipe
    positions: BlockRecipe | None
    final: BlockRecipe
    per_layer: tuple[BlockRecipe, ...] = ()  # the table of per-layer embeddings, and their projection
    mtp: tuple[BlockRecipe, ...] = ()  # of a layer for multi-token prediction: its projection, norms and blocks

    @property
    def distinct_blocks(self) -> list[BlockRecipe]:
        """Blocks to write, without duplicates."""
        blocks = [block for layer in self.layers for block in layer] + [self.embedding, self.head, self.final]
        blocks += self.per_layer + self.mtp
        return list(dict.fromkeys(blocks + ([self.positions] if self.positions else [])))

    @property
    def nbytes(self) -> int:
        """Size in bytes of all distinct blocks."""
        return sum(block.shape.nbytes for block in self.distinct_blocks)


def plan_pack(model: Model, source: Source, dtype: str) -> PackPlan:
    """Plan the pack of a model: choose the format of each part and the layout of each run.

    With `--dtype auto`, each tensor gets the format that keeps its codes or floats. Models whose neurons are stored as
    records have fewer formats: there, other tensors of at most 4.5 bits per weight become q4, and larger ones q8.

    With `q4` and `q4s`, the tensors that affect quality most are stored in q8: the embedding and head, k and v if
    several query heads share a KV head, and the latent projections.

    If a run would contain both float and quantised parts, the float parts are stored in q8.

    Raises:
        ModelError: if a tensor is missing or unknown, or `dtype` is not possible for this model.
    """
    check_all_tensors_used(model, source)
    if dtype not in DTYPES:
        raise ModelError(f"--dtype {dtype} is not known; choose from {', '.join(DTYPES)}")
    formats = _Formats(model.config, source, dtype)
    layers = [[(refs, formats.runs(refs)) for refs in layer] for layer in model.layers]
    everything = [run for layer in layers for _, runs in layer for run in runs.items()]
    geometry = _Geometry(model.config, {name for name, formats in everything if _any_quantised(formats)})
    planned = tuple(
        tuple(geometry.at_layer(number).block(refs, runs) for refs, runs in layer)
        for number, layer in enumerate(layers)
    )
    embedding = geometry.table(model.embedding, formats.one(model.embedding, "table"), model.config.vocab)
    head = geometry.table(model.head, formats.one(model.head, "table"), model.config.vocab) if model.head else embedding
    rows = find(source, model.positions.tensor).rows if model.positions else 0
    positions = geometry.table(model.positions, "f32", rows) if model.positions else None
    return PackPlan(
        planned,
        embedding,
        head,
        positions,
        geometry.final(model.final),
        _per_layer(model, formats, geometry),
        _mtp(model, formats, geometry),
    )


def _mtp(model: Model, formats: "_Formats", geometry: "_Geometry") -> tuple[BlockRecipe, ...]:
    """Return the recipes of the layer for multi-token prediction: of its projection, its norms, then its blocks."""
    if model.mtp is None:
        return ()
    refs, width = model.mtp.projection, 2 * model.config.hidden
    projection = geometry.table(refs, formats.one(refs, "table", hidden=width), model.config.hidden, hidden=width)
    blocks = (geometry.block(block, formats.runs(block)) for block in model.mtp.blocks)
    return projection, geometry.final(model.mtp.norms), *blocks


def _per_layer(model: Model, formats: "_Formats", geometry: "_Geometry") -> tuple[BlockRecipe, ...]:
    """Return the recipes of the table of per-layer embeddings and of their projection; () if there are none.

    The table has units of few rows, since one unit is read from disk for each token.
    """
    if not model.per_layer:
        return ()
    config, (table, projection) = model.config, model.per_layer
    values = config.per_layer_values
    format = formats.one(table, "table", hidden=values)
    return (
        geometry.table(table, format, config.vocab, TILE_OUTPUTS, values),
        geometry.table(projection, formats.one(projection, "table"), values),
    )


class _Formats:
    """Choice of the format of each part, from `--dtype` and the formats of the source."""

    def __init__(self, config: ModelConfig, source: Source, dtype: str) -> None:
        self._config, self._source, self._dtype = config, source, dtype
        self._records = stores_records(config)

    def runs(self, refs: BlockRefs) -> dict[RunName, dict[str, Format]]:
        """Return the format of each part, for every run of a block."""
        runs = attention_parts(self._config) if refs.kind == "attention" else _RUNS[refs.kind]
        shapes = attention_shapes(self._config) if refs.kind == "attention" else {}
        hidden = {run: shapes[run].hidden if run in shapes else self._config.hidden for run in runs}
        return {run: self._run(names, refs, _pieces(refs, run), hidden[run]) for run, names in runs.items()}

    def _run(self, names: tuple[str, ...], refs: BlockRefs, pieces: Pieces, hidden: int) -> dict[str, Format]:
        """Return the formats of a run's parts `names`, whose vectors have `hidden` values: all quantised, or none.

        If only some matrices are quantised, the others become q8; if vectors are not whole groups, all become f32. A
        part whose matrices have different formats, in a block of experts, is stored in q8, or in f32 if all are floats.
        """
        found: dict[str, set[Format]] = {}
        for name, ref in (part for piece in pieces for part in piece if part[0] in names):
            found.setdefault(name, set()).add(self.one(ref, refs.kind, name))
        quantised = {is_quantised(format) for formats in found.values() for format in formats}
        common: Format = "q8" if any(quantised) and hidden % GROUP == 0 else "f32"
        chosen = {name: formats.pop() if len(formats) == 1 else common for name, formats in found.items()}
        if all(quantised) or not any(quantised):
            return chosen
        return {name: format if is_quantised(format) and common == "q8" else common for name, format in chosen.items()}

    def one(self, ref: Ref, kind: BlockKind, name: str = "row", hidden: int = 0) -> Format:
        """Return the format of one matrix. `hidden` is the length of a table's rows if it is not the hidden size."""
        element = find(self._source, ref.tensor).element
        nearest = _in_records(element) if self._records and kind == "ffn" else element.nearest
        if self._dtype in ("auto", nearest):
            return nearest
        if self._dtype not in ("q4", "q4s"):
            return cast(Format, self._dtype)
        if kind == "table":
            return "q8" if (hidden or self._config.hidden) % GROUP == 0 else "f32"
        several = self._config.heads >= 2 * self._config.kv_heads or self._config.latent is not None
        shared = kind == "attention" and name in ("k", "v", "latent", "q_latent") and several
        return "q8" if shared else cast(Format, self._dtype)


class _Geometry:
    """Builder of block recipes, with unit widths that are the same in every layer."""

    def __init__(self, config: ModelConfig, quantised: Collection[RunName]) -> None:
        self._config = config
        self._query_heads = query_unit_heads(config, not {"query", "query_up"}.isdisjoint(quantised))
        self._kv_heads = kv_unit_heads(config, "kv" in quantised)
        self._widths: dict[RunName, int] = {"value": FFN_UNIT}  # vectors in a unit, for the runs of recurrent blocks
        if (heads := config.state_heads) is not None:
            least = heads.unit_heads * heads.value
            values = fewest_heads(least, GROUP) if "value" in quantised else 1
            keys = fewest_heads(heads.key, TILE_OUTPUTS) if "key" in quantised else 1
            self._widths = {"value": values * least, "key": keys * heads.key}

    def at_layer(self, layer: int) -> "_Geometry":
        """Return the builder for the blocks of `layer`, whose heads may differ from those of other layers."""
        found = copy(self)
        found._config = self._config.at_layer(layer)
        return found

    def block(self, refs: BlockRefs, runs: Mapping[RunName, Mapping[str, Format]]) -> BlockRecipe:
        """Return the recipe of a layer's block; `runs` has the formats of each run's parts."""
        if refs.kind == "attention":
            return self.attention(refs, runs)
        if refs.kind in RECURRENT:
            return self.recurrent(refs, runs)
        return self.experts(refs, runs) if refs.kind == "experts" else self.ffn(refs, runs["neuron"])

    def attention(self, refs: BlockRefs, runs: Mapping[RunName, Mapping[str, Format]]) -> BlockRecipe:
        """Return the recipe of an attention block: the runs `query` and `kv`, and others for latent attention."""
        config = self._config
        widths: dict[RunName, int] = {
            "latent": FFN_UNIT,
            "query_latent": FFN_UNIT,
            "query_up": self._query_heads * config.head_dim,
            "query": self._query_heads * config.head_dim,
            "kv": self._kv_heads * config.kv_width,
        }
        made = (
            self._run(name, refs, runs[name], widths[name], shape.vectors or 0, hidden=shape.hidden)
            for name, shape in attention_shapes(config).items()
        )
        return BlockRecipe("attention", tuple(made), self._vectors(refs))

    def recurrent(self, refs: BlockRefs, runs: Mapping[RunName, Mapping[str, Format]]) -> BlockRecipe:
        """Return the recipe of a recurrent block.

        The run `value` holds its value heads or channels. If the block has key heads, they are in the run `key`.
        """
        made = (
            self._run(name, refs, runs[name], self._widths[name], shape.vectors or 0)
            for name, shape in recurrent_shapes(self._config)[refs.kind].items()
        )
        return BlockRecipe(refs.kind, tuple(made), self._vectors(refs))

    def ffn(self, refs: BlockRefs, formats: Mapping[str, Format]) -> BlockRecipe:
        """Return the recipe of a feed-forward block, whose one run is called `neuron`.

        Each neuron is stored as a separate record if single neurons can be computed.
        """
        run = self._neurons("neuron", refs, formats, self._config.intermediate)
        return BlockRecipe("ffn", (run,), self._vectors(refs))

    def experts(self, refs: BlockRefs, runs: Mapping[RunName, Mapping[str, Format]]) -> BlockRecipe:
        """Return the recipe of a block of experts: the run `neuron` with the routed experts, and `shared` if any."""
        mixture = self._config.mixture
        assert mixture is not None
        routed = self._neurons("neuron", refs, runs["neuron"], mixture.width)
        if not mixture.shared:
            return BlockRecipe("experts", (routed,), self._vectors(refs))
        shared = self._neurons("shared", refs, runs["shared"], mixture.shared)
        return BlockRecipe("experts", (shared, routed), self._vectors(refs))

    def _neurons(self, name: RunName, refs: BlockRefs, formats: Mapping[str, Format], vectors: int) -> RunRecipe:
        run = self._run(name, refs, formats, FFN_UNIT, vectors, stores_records(self._config))
        assert run.layout.units == len(run.pieces) * ffn_units(vectors)
        return run

    def table(
        self, ref: Ref, format: Format, rows: int, width: int = FFN_UNIT, hidden: int | None = None
    ) -> BlockRecipe:
        """Return the recipe of a table: the embedding, the head, or learned positions. Its one run is called `row`.

        A unit has `width` rows of `hidden` values; by default, a row is as long as a token's hidden state.
        """
        refs = BlockRefs("table", (("row", ref),), ())
        return BlockRecipe("table", (self._run("row", refs, {"row": format}, width, rows, hidden=hidden),), ())

    def final(self, refs: BlockRefs) -> BlockRecipe:
        """Return the recipe of the block that holds the vectors of the final norm."""
        return BlockRecipe("vectors", (), self._vectors(refs))

    def _run(
        self, name: RunName, refs: BlockRefs, formats: Mapping[str, Format], width: int, vectors: int,
        records: bool = False, hidden: int | None = None,
    ) -> RunRecipe:  # fmt: skip
        chosen = [{part: ref for part, ref in piece if part in formats} for piece in _pieces(refs, name)]
        parts = tuple(Part(part, formats[part], _AXES.get(part, "row")) for part in chosen[0])
        tiled = _any_quantised(formats) and not records
        units = len(chosen) * -(-vectors // width)
        layout = RunLayout(name, "tiled" if tiled else "record", parts, width, hidden or self._config.hidden, units)
        return RunRecipe(layout, tuple(tuple(piece.values()) for piece in chosen), vectors)

    def _vectors(self, refs: BlockRefs) -> tuple[tuple[str, Ref, int], ...]:
        config = self._config
        lengths = {
            "q.bias": config.heads * config.head_dim, "k.bias": config.kv_heads * config.head_dim,
            "q_norm.whole": config.heads * config.head_dim, "k_norm.whole": config.kv_heads * config.head_dim,
            "v.bias": config.kv_heads * config.head_dim, "q_norm": config.head_dim, "k_norm": config.head_dim,
            "gate.bias": config.intermediate, "up.bias": config.intermediate, "sinks": config.heads, "layer_scale": 1,
            "latent.norm": config.kv_hidden, "latent.bias": config.latent_values,
            "q_latent.norm": config.query_rank, "q_latent.bias": config.query_rank,
        }  # fmt: skip
        if refs.kind in RECURRENT:
            lengths = recurrent_vectors(config, refs.kind)
        if config.mixture is not None and refs.kind == "experts":
            experts, width = config.mixture.experts, config.mixture.width
            lengths = {
                "router": experts * config.hidden, "router.bias": experts, "router.choice": experts,
                "router.factors": experts, "layer_scale": 1,
                "gate.biases": experts * width, "up.biases": experts * width, "down.biases": experts * config.hidden,
            }  # fmt: skip
        lengths |= per_layer_vectors(config) | {"per_layer.first_norm": config.per_layer}
        return tuple((name, ref, lengths.get(name, config.hidden)) for name, ref in refs.vectors)


def stores_records(config: ModelConfig) -> bool:
    """Return True if single neurons of a model can be read and computed, so each is stored as a record.

    In models with experts or recurrent layers, all neurons are computed (`master.workers.predictors.are_records`).
    """
    return config.activation in SPARSE and config.mixture is None and not any(config.recurrent)


def _in_records(element: Element) -> Format:
    """Return the format that `--dtype auto` chooses for a tensor in the record layout."""
    if element.nearest in RECORDS:
        return element.nearest
    return "q4" if 8 * element.group_bytes <= 4.5 * element.group else "q8"


def _pieces(refs: BlockRefs, run: RunName) -> Pieces:
    """Return the parts of each piece of the run `run`.

    Each routed expert is one piece; any other run is a single piece.
    """
    return refs.experts if refs.experts and run == "neuron" else (refs.parts,)


def _any_quantised(formats: Mapping[str, Format]) -> bool:
    return any(map(is_quantised, formats.values()))
