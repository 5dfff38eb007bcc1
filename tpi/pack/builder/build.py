"""Packing of a model: plan, blocks, tokenizer, manifest. The pack's directory is created atomically."""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from shutil import disk_usage
from typing import Any

from tpi.errors import WeightsError
from tpi.families.base import Model
from tpi.families.gguf.reader import from_gguf
from tpi.families.huggingface.directory import open_directory, read_config
from tpi.pack.builder import tokens
from tpi.pack.builder.ggufvocab import check_vocabulary
from tpi.pack.builder.plan import BlockRecipe, PackPlan, plan_pack
from tpi.pack.builder.tokens import TOKENIZER
from tpi.pack.builder.writer import NO_IMPORTANCE, BlockWriter, Importance
from tpi.pack.library.store import build, build_directory, sync_directory, write_synced
from tpi.pack.manifest import MANIFEST, Manifest
from tpi.pack.reader import is_pack
from tpi.progress import Phase, phase
from tpi.sources.base import Source
from tpi.sources.gguf import open_gguf
from tpi.sources.ggufparts import gguf_name

_SPARE = 64 << 20  # bytes of disk to leave free
Room = Callable[[int], None]


@dataclass(frozen=True)
class OpenedSource:
    """A model whose source files are open. `tokenizer` writes tokenizer.json and returns the manifest's metadata."""

    name: str
    model: Model
    source: Source
    tokenizer: Callable[[Path], dict[str, Any]]


def open_source(path: Path) -> OpenedSource:
    """Open a GGUF file or a Hugging Face directory and check that it is a model that can be packed.

    Raises:
        ModelError: if it is damaged, or its architecture is not supported.
    """
    if path.is_dir():
        fields = read_config(path)
        model, tensors = open_directory(path, fields)
        vocab = model.config.vocab
        return OpenedSource(
            path.resolve().name, model, tensors, lambda out: tokens.from_directory(path, fields, vocab, out)
        )
    gguf = open_gguf(path)
    if "tokenizer.ggml.tokens" in gguf.metadata:
        check_vocabulary(gguf)  # report an unsupported vocabulary now, not after the weights are written
    return OpenedSource(gguf_name(path), from_gguf(gguf), gguf, lambda out: tokens.from_gguf(gguf, out))


def pack_model(
    opened: OpenedSource,
    dtype: str,
    target: Path,
    progress: Phase = phase,
    overwrite: bool = False,
    room: Room | None = None,
) -> None:
    """Write the pack of a model to the directory `target`, and close the source.

    Args:
        opened: the model; `open_source` opens it.
        dtype: auto, f32, bf16, q8, q4 or q4s.
        target: the directory of the pack. If it already holds a pack, nothing is done unless `overwrite` is True.
        progress: starts a display of progress.
        room: called with the number of bytes needed; it may free that much space.

    Raises:
        ModelError: if a tensor is missing or of the wrong shape, or `dtype` is not possible.
        WeightsError: if the disk is full or cannot be written.
    """
    plan = plan_pack(opened.model, opened.source, dtype)
    for note in opened.model.notes:
        sys.stderr.write(f"tpi: {opened.name}: {note}\n")
    try:
        if room is not None:
            room(plan.nbytes)
        build(target, lambda directory: _fill(opened, plan, dtype, directory, progress), is_pack, overwrite)
    finally:
        opened.source.close()


def repair_pack(
    opened: OpenedSource,
    dtype: str,
    target: Path,
    manifest: Manifest,
    blocks: Collection[str],
    tokenizer: bool,
    progress: Phase = phase,
) -> bool:
    """Write the blocks `blocks` of the pack in `target` again, and its tokenizer if `tokenizer` is True.

    `opened` is the model that the pack was made from; its source is closed at the end.

    Return False, and change nothing, if the source does not result in the blocks that `manifest` names.

    Raises:
        ModelError: if a tensor is missing or of the wrong shape, or `dtype` is not possible.
        WeightsError: if the disk is full or cannot be written.
    """
    plan = plan_pack(opened.model, opened.source, dtype)
    wanted = {name: block for name, block in _named(manifest, plan) if name in blocks}
    total = sum(block.shape.nbytes for block in wanted.values())
    try:
        with (
            build_directory(target) as draft,
            progress(f"mending the pack of {opened.name}") as report,
            BlockWriter(opened.source, draft, report, total) as writer,
        ):
            opened.tokenizer(draft)
            measured = _importances(opened, plan, draft)
            if not _written_again(writer, plan, wanted, measured) or len(wanted) != len(blocks):
                return False
            if not tokenizer:
                (draft / TOKENIZER).unlink(missing_ok=True)
            for file in draft.iterdir():
                file.replace(target / file.name)
            sync_directory(target)
    finally:
        opened.source.close()
    return True


def _named(manifest: Manifest, plan: PackPlan) -> Iterator[tuple[str, BlockRecipe]]:
    """Yield the name and the recipe of each block of a pack, from its manifest and its plan."""
    for names, blocks in zip(manifest.layers, plan.layers, strict=True):
        yield from zip(names, blocks, strict=True)
    yield from ((manifest.embedding, plan.embedding), (manifest.head, plan.head), (manifest.final, plan.final))
    if manifest.positions and plan.positions:
        yield manifest.positions, plan.positions
    yield from zip(manifest.per_layer, plan.per_layer, strict=True)
    yield from zip(manifest.mtp, plan.mtp, strict=False)  # packs of earlier versions lack the layer


def _written_again(
    writer: BlockWriter, plan: PackPlan, wanted: Mapping[str, BlockRecipe], measured: Iterator[Importance]
) -> bool:
    """Write the blocks `wanted`; return True if each has its name, which is the hash of its content.

    `measured` yields the importance of the weights of each layer's blocks, in order. It is read as far as the last
    wanted block, so layers after it are not computed.
    """
    left = set(wanted.values()) & {block for layer in plan.layers for block in layer}
    for block in (block for layer in plan.layers for block in layer):
        if not left:
            break
        importance = next(measured)
        if block in left:
            left.remove(block)
            writer.write(block, importance)
    return all(writer.write(block) == name for name, block in wanted.items())


def _importances(opened: OpenedSource, plan: PackPlan, directory: Path) -> Iterator[Importance]:
    """Return the importance of the weights of each block of each layer, in order of use (`tpi.calibration`).

    It is measured if weights are rounded to 4 bits, and if `directory` has the model's tokenizer.
    """
    from tpi.calibration.floats import weighs_errors

    if not weighs_errors(plan, opened.source):
        return repeat(NO_IMPORTANCE)
    if not (directory / TOKENIZER).exists():
        sys.stderr.write(f"tpi: {opened.name}: no tokenizer, so all errors of its weights count alike in 4 bits\n")
        return repeat(NO_IMPORTANCE)
    from tpi.calibration.forward import importances
    from tpi.calibration.text import calibration_tokens

    config = opened.model.config
    tokens = calibration_tokens(directory / TOKENIZER, config.vocab, config.context)
    return importances(config, plan, opened.source, tokens)


def _fill(opened: OpenedSource, plan: PackPlan, dtype: str, directory: Path, progress: Phase) -> None:
    """Write all files of a pack into `directory`, the manifest last."""
    free = disk_usage(directory).free
    if plan.nbytes + _SPARE > free:
        raise WeightsError(
            f"disk full: the pack takes {plan.nbytes >> 20} MiB, {_SPARE >> 20} MiB must stay free, and "
            f"{directory.parent} has {free >> 20} MiB free; free some space, or choose a directory on another disk "
            "(TPI_CACHE moves the cache)"
        )
    with progress(f"converting the tokenizer of {opened.name}"):
        metadata = opened.tokenizer(directory)
    with (
        progress(f"packing {opened.name}") as report,
        BlockWriter(opened.source, directory, report, plan.nbytes) as writer,
    ):
        measured = _importances(opened, plan, directory)
        layers = tuple(tuple(writer.write(block, next(measured)) for block in blocks) for blocks in plan.layers)
        embedding, head, final = writer.write(plan.embedding), writer.write(plan.head), writer.write(plan.final)
        positions = writer.write(plan.positions) if plan.positions else None
        per_layer = tuple(map(writer.write, plan.per_layer))
        mtp = tuple(map(writer.write, plan.mtp))
    if loss := writer.losses.report():
        sys.stderr.write(f"tpi: {opened.name}: {loss}\n")
    if opened.model.predictors or opened.model.gpu_marks_file:
        from tpi.sparsity.powerinfer import write_sparsity_data

        write_sparsity_data(opened.model, opened.source, directory)
    config, shapes = opened.model.config, writer.shapes
    manifest = Manifest(
        config, dtype, shapes, layers, embedding, head, positions, final, metadata, opened.name, per_layer, mtp
    )
    write_synced(directory / MANIFEST, manifest.to_json().encode())
