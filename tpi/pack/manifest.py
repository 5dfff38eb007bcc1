"""The manifest of a pack: configuration, tokenizer facts, and which block each layer uses. Validated on loading."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpi.config import ModelConfig
from tpi.errors import ModelError
from tpi.families.checks import check_config
from tpi.pack.blockfile import BlockShape

MANIFEST = "manifest.json"
PACK_VERSION = 1
_MAX_BYTES = 32 << 20
_ID = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Manifest:
    """What a pack holds. Blocks are named by their content, so equal layers name the same block."""

    config: ModelConfig
    dtype: str
    blocks: dict[str, BlockShape]
    layers: tuple[tuple[str, str], ...]  # attention and ffn block of each layer
    embedding: str
    head: str
    positions: str | None
    final: str
    tokenizer: dict[str, Any] = field(default_factory=dict)
    source: str = ""  # the name of what was packed, for people

    def to_json(self) -> str:
        """The text of manifest.json."""
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
                raise ModelError(f"{path} is larger than a manifest can be; pack the model again")
            fields = json.loads(path.read_bytes())
            if fields["tpi_pack"] != PACK_VERSION:
                found = fields["tpi_pack"]
                raise ModelError(f"{path} has pack version {found}, not {PACK_VERSION}; pack the model again")
            return _manifest(fields)
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}; give the directory of a pack") from error
        except (KeyError, TypeError, ValueError, RecursionError, AttributeError) as error:
            raise ModelError(f"{path} is damaged ({error!r}); pack the model again") from error


def _manifest(fields: dict[str, Any]) -> Manifest:
    config = ModelConfig.from_dict(fields["config"])
    check_config(config, MANIFEST)
    blocks = {name: BlockShape.from_dict(shape) for name, shape in fields["blocks"].items()}
    layers = tuple((str(attention), str(ffn)) for attention, ffn in fields["layers"])
    if not all(_ID.fullmatch(name) for name in blocks) or len(layers) != config.layers:
        raise ValueError("block names or number of layers")
    manifest = Manifest(
        config, str(fields["dtype"]), blocks, layers, fields["embedding"], fields["head"], fields["positions"],
        fields["final"], dict(fields["tokenizer"]), str(fields["source"]),
    )  # fmt: skip
    _check_blocks(manifest)
    return manifest


def _check_blocks(manifest: Manifest) -> None:
    """Every block that is named exists, is of the right kind, and has the runs and the sizes that the model needs."""
    config, blocks = manifest.config, manifest.blocks
    for attention, ffn in manifest.layers:
        query, kv = blocks[attention].run("query"), blocks[attention].run("kv")
        neuron = blocks[ffn].run("neuron")
        if query.width % config.head_dim or kv.width % config.head_dim:
            raise ValueError("width of a head")
        if (blocks[attention].kind, blocks[ffn].kind) != ("attention", "ffn"):
            raise ValueError("kinds of blocks")
        _check_run(query.units, query.width, config.heads * config.head_dim)
        _check_run(kv.units, kv.width, config.kv_heads * config.head_dim)
        _check_run(neuron.units, neuron.width, config.intermediate)
    for table in (manifest.embedding, manifest.head):
        row = blocks[table].run("row")
        _check_run(row.units, row.width, config.vocab)
    if any(run.hidden != config.hidden for shape in blocks.values() for run in shape.runs):
        raise ValueError("hidden size")
    if "norm" not in dict(blocks[manifest.final].vectors):
        raise ValueError("final norm")


def _check_run(units: int, width: int, vectors: int) -> None:
    if not 0 <= units * width - vectors < width:
        raise ValueError(f"{units} units of {width} for {vectors} vectors")
