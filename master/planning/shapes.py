"""The shapes of a model's blocks: from a pack, a GGUF file, a Hugging Face directory, or its config.json alone."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tpi.config import ModelConfig
from tpi.families.base import Fields, Model
from tpi.families.gguf.reader import from_gguf
from tpi.families.huggingface.configonly import from_config
from tpi.families.huggingface.directory import open_directory, read_config
from tpi.pack.blockfile import BlockShape
from tpi.pack.builder.plan import PackPlan, plan_pack
from tpi.pack.library.locate import locate
from tpi.pack.library.quantisations import HouseMemory
from tpi.pack.manifest import MANIFEST, Manifest
from tpi.pack.routing import NAME, load_routing
from tpi.paths import user_path
from tpi.sources.base import Source
from tpi.sources.gguf import open_gguf

_CONFIG = "config.json"
_ROOM = 0.9  # part of the memory for weights; the rest is for keys, values and activations
_FLOAT_FORMATS = ("auto", "bf16", "q8", "q4")  # `--dtype auto` of float models: the first whose weights fit


@dataclass(frozen=True)
class ModelShape:
    """The shapes of a model, block by block, in order of use. No weights are read for it.

    `routing` is the record of `tpi profile` next to its pack (`tpi.pack.routing.RoutingRecord.to_bytes`), or empty.
    """

    name: str
    dtype: str
    config: ModelConfig
    blocks: tuple[BlockShape, ...]
    embedding: BlockShape
    head: BlockShape
    routing: bytes = b""
    per_layer: tuple[BlockShape, ...] = ()  # the table of per-layer embeddings, and their projection
    mtp: tuple[BlockShape, ...] = ()  # of the layer for multi-token prediction: its projection, norms and blocks


def model_shape(spec: str, dtype: str, cache: Path, room: int, machines: int = 1) -> ModelShape:
    """Return the shape of the model that `spec` names.

    Args:
        spec: a model as for `tpi run -m`, a config.json, or a directory with a config.json and no weights.
        dtype: as for `tpi run`; a pack keeps its own. `auto` for float weights is the first format that fits.
        room: bytes of memory of all kinds together, into which `auto` has to fit the weights.
        machines: number of machines that have this memory.

    Raises:
        ModelError: if the model does not exist, or its architecture is not supported.
    """
    path = user_path(spec)
    if path.suffix == ".json" and path.is_file():
        return _of_directory(path.parent, path.name, dtype, room)
    located = locate(spec, cache, weights=False, house=lambda: HouseMemory(room, machines))
    if located.kind == "pack":
        return _of_pack(located.path)
    if located.kind == "directory":
        return _of_directory(located.path, _CONFIG, dtype, room)
    with closing(open_gguf(located.path)) as source:
        return _planned(located.name, dtype, from_gguf(source), source)


def shape_of_config(name: str, fields: Fields, dtype: str) -> ModelShape:
    """Return the shape of the model whose config.json has `fields`.

    Raises:
        ModelError: if the model's architecture or a setting is not supported.
    """
    model, source = from_config(fields, name)
    return _planned(name, dtype, model, source)


def _of_pack(path: Path) -> ModelShape:
    manifest = Manifest.load(path / MANIFEST)
    blocks = tuple(manifest.blocks[name] for layer in manifest.layers for name in layer)
    tables = (manifest.blocks[manifest.embedding], manifest.blocks[manifest.head])
    routing = load_routing(path / NAME).to_bytes() if (path / NAME).exists() else b""
    per_layer, mtp = (tuple(manifest.blocks[name] for name in names) for names in (manifest.per_layer, manifest.mtp))
    return ModelShape(
        manifest.source or path.name, manifest.dtype, manifest.config, blocks, *tables, routing, per_layer, mtp
    )


def _of_directory(directory: Path, config: str, dtype: str, room: int) -> ModelShape:
    name = directory.resolve().name
    with _opened(directory, config) as (model, source):
        if dtype != "auto":
            return _planned(name, dtype, model, source)
        shapes = [_planned(name, each, model, source) for each in _FLOAT_FORMATS]
        fitting = (shape for shape in shapes if weight_bytes(shape) <= _ROOM * room)
        return next(fitting, min(shapes, key=weight_bytes))


@contextmanager
def _opened(directory: Path, config: str) -> Iterator[tuple[Model, Source]]:
    fields = read_config(directory, config)
    if not any(directory.glob("*.safetensors")):
        yield from_config(fields, str(directory / config))
        return
    model, source = open_directory(directory, fields)
    with closing(source):
        yield model, source


def _planned(name: str, dtype: str, model: Model, source: Source) -> ModelShape:
    plan: PackPlan = plan_pack(model, source, dtype)
    blocks = tuple(block.shape for layer in plan.layers for block in layer)
    per_layer, mtp = (tuple(recipe.shape for recipe in recipes) for recipes in (plan.per_layer, plan.mtp))
    tables = (plan.embedding.shape, plan.head.shape)
    return ModelShape(name, dtype, model.config, blocks, *tables, per_layer=per_layer, mtp=mtp)


def weight_bytes(shape: ModelShape) -> int:
    """Return the bytes of the units of all blocks and tables that need memory; tied tables count once."""
    tables = ((shape.head,) if shape.config.tied else (shape.embedding, shape.head)) + shape.per_layer[1:]
    return sum(run.units * run.unit_bytes for block in (*shape.blocks, *tables) for run in block.runs)
