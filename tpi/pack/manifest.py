"""The manifest of a pack: configuration, tokenizer metadata, and the blocks of each layer. Validated when loaded."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpi.config import ModelConfig
from tpi.errors import ModelError
from tpi.families.checks import check_config
from tpi.pack.blockfile import BlockShape
from tpi.pack.layout import (
    BlockKind,
    RunName,
    RunShape,
    attention_shapes,
    ffn_units,
    per_layer_vectors,
    recurrent_shapes,
)
from tpi.partition import FFN_UNIT
from tpi.sources.files import parse_json

MANIFEST = "manifest.json"
PACK_VERSION = 2
_MAX_BYTES = 8 << 20
_ID = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Manifest:
    """Contents of a pack. Blocks are named by a hash of their content, so equal layers name the same block."""

    config: ModelConfig
    dtype: str
    blocks: dict[str, BlockShape]
    layers: tuple[tuple[str, ...], ...]  # the blocks of each layer, in order of use
    embedding: str
    head: str
    positions: str | None
    final: str
    tokenizer: dict[str, Any] = field(default_factory=dict)
    source: str = ""  # the source model's name, for display only
    per_layer: tuple[str, ...] = ()  # the table of per-layer embeddings, and their projection
    mtp: tuple[str, ...] = ()  # of a layer for multi-token prediction: its projection, its norms, then its blocks

    def to_json(self) -> str:
        """Return the text of manifest.json."""
        fields = {
            "tpi_pack": PACK_VERSION,
            "source": self.source,
            "dtype": self.dtype,
            "config": self.config.to_dict(),
            "tokenizer": self.tokenizer,
            "layers": self.layers,
            "embedding": self.embedding,
            "head": self.head,
            "positions": self.positions,
            "final": self.final,
            "per_layer": self.per_layer,
            "mtp": self.mtp,
            "blocks": {name: shape.to_dict() for name, shape in self.blocks.items()},
        }
        return json.dumps(fields, indent=1)

    @classmethod
    def load(cls, path: Path) -> "Manifest":
        """Read and validate manifest.json.

        Raises:
            ModelError: if it is missing, of another version, or not consistent.
        """
        try:
            if path.stat().st_size > _MAX_BYTES:
                raise ValueError("too large")
            fields = parse_json(path.read_bytes())
            version = fields["tpi_pack"]
            if version == PACK_VERSION:
                return _manifest(fields)
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}; give the directory of a pack") from error
        except (ModelError, KeyError, TypeError, ValueError, RecursionError, AttributeError, OverflowError) as error:
            reason = error if isinstance(error, ModelError) else repr(error)
            raise ModelError(f"{path} cannot be used ({str(reason)[:200]}); pack the model again") from error
        raise ModelError(f"{path} has pack version {str(version)[:80]}, not {PACK_VERSION}; pack the model again")


def _manifest(fields: dict[str, Any]) -> Manifest:
    config = ModelConfig.from_dict(fields["config"])
    check_config(config, "config")
    blocks = {name: BlockShape.from_dict(shape) for name, shape in fields["blocks"].items()}
    layers = tuple(tuple(map(str, names)) for names in fields["layers"])
    if not all(_ID.fullmatch(name) for name in blocks) or len(layers) != config.layers:
        raise ValueError("the name of a block, or the number of layers, is wrong")
    manifest = Manifest(
        config, str(fields["dtype"]), blocks, layers, fields["embedding"], fields["head"], fields["positions"],
        fields["final"], dict(fields["tokenizer"]), str(fields["source"]),
        tuple(fields.get("per_layer", ())), tuple(map(str, fields.get("mtp", ()))),
    )  # fmt: skip
    _check_blocks(manifest)
    return manifest


def _check_blocks(manifest: Manifest) -> None:
    """Check that every block that the manifest names exists and has the kind, the runs and the sizes of the model."""
    config, blocks = manifest.config, manifest.blocks
    runs: dict[BlockKind, dict[RunName, RunShape]]
    runs = {"attention": {}, "ffn": {}, **recurrent_shapes(config)}
    if (mixture := config.mixture) is not None:
        shared: dict[RunName, RunShape] = {"shared": RunShape(mixture.shared, 1, config.hidden)}
        routed = RunShape(mixture.experts * ffn_units(mixture.width) * FFN_UNIT, 1, config.hidden)
        runs["experts"] = (shared if mixture.shared else {}) | {"neuron": routed}
    for layer, names in enumerate((*manifest.layers, *_check_mtp(manifest))):
        own = config.at_layer(layer)
        runs |= {"attention": attention_shapes(own), "ffn": {"neuron": RunShape(own.intermediate, 1, own.hidden)}}
        if not names:
            raise ValueError("a layer has no blocks")
        if config.parallel_experts and [blocks[name].kind for name in names[1:]] != ["ffn", "experts"]:
            raise ValueError("a layer lacks its dense feed-forward block or its experts")
        for name in names:
            kind = blocks[name].kind
            if kind not in runs:
                raise ValueError(f"a layer has a block of unknown kind {kind!r}")
            _check(blocks[name], kind, runs[kind])
            if mixture and kind == "experts":
                _check_router(blocks[name], mixture.experts * config.hidden)
    for table in (manifest.embedding, manifest.head):
        _check(blocks[table], "table", {"row": RunShape(config.vocab, 1, config.hidden)})
    _check_per_layer(manifest)
    if manifest.positions is not None:
        _check(blocks[manifest.positions], "table", {"row": RunShape(None, 1, config.hidden)})
    if blocks[manifest.final].kind != "vectors" or "norm" not in dict(blocks[manifest.final].vectors):
        raise ValueError("the final norm is missing")


def _check_per_layer(manifest: Manifest) -> None:
    """Check the table, the projection and the norm of per-layer embeddings.

    Other models must have none of the three.
    """
    config, blocks = manifest.config, manifest.blocks
    if len(manifest.per_layer) != (2 if config.per_layer else 0):
        raise ValueError("it lacks the per-layer embeddings, or has some that its model does not use")
    if not config.per_layer:
        return
    table, projection = manifest.per_layer
    _check(blocks[table], "table", {"row": RunShape(config.vocab, 1, config.per_layer_values)})
    _check(blocks[projection], "table", {"row": RunShape(config.per_layer_values, 1, config.hidden)})
    if ("per_layer.first_norm", config.per_layer) not in blocks[manifest.final].vectors:
        raise ValueError("the norm of the per-layer embeddings is missing")
    if any(not per_layer_vectors(config).items() <= set(blocks[names[-1]].vectors) for names in manifest.layers):
        raise ValueError("a layer lacks the vectors for its embedding")


def _check_mtp(manifest: Manifest) -> tuple[tuple[str, ...], ...]:
    """Check the projection and the norms of the layer for multi-token prediction, and return the blocks of that layer.

    The result is empty if the model has no such layer.
    """
    if not manifest.mtp:
        return ()
    projection, norms, *blocks = manifest.mtp
    hidden, shape = manifest.config.hidden, manifest.blocks[norms]
    _check(manifest.blocks[projection], "table", {"row": RunShape(hidden, 1, 2 * hidden)})
    if shape.kind != "vectors" or not {(name, hidden) for name in ("token", "hidden", "norm")} <= set(shape.vectors):
        raise ValueError("a norm of the layer for multi-token prediction is missing")
    return (tuple(blocks),)


def _check_router(shape: BlockShape, values: int) -> None:
    if ("router", values) not in shape.vectors:
        raise ValueError("a block of experts has no router")


def _check(shape: BlockShape, kind: BlockKind, runs: Mapping[RunName, RunShape]) -> None:
    """Raise ValueError unless the block has the kind `kind` and exactly the runs `runs`."""
    if shape.kind != kind or [run.name for run in shape.runs] != list(runs):
        raise ValueError(f"a block of kind {shape.kind} does not have the runs {list(runs)} of kind {kind}")
    for run in shape.runs:
        wanted = runs[run.name]
        fits = wanted.vectors is None or 0 <= run.units * run.width - wanted.vectors < run.width
        if not fits or run.hidden != wanted.hidden or run.width % wanted.step:
            raise ValueError(
                f"run {run.name} has {run.units} units of {run.width} vectors; {wanted.vectors} vectors are expected"
            )
