"""Copies of a pack with the neurons of each layer in another order.

Each neuron's record is copied unchanged, together with its biases. A record has its own scales, so no weight is rounded
again, and the two packs compute the same sums in another order. Files other than feed-forward blocks are links to those
of the original pack.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from shutil import copyfile, disk_usage

import numpy as np
import numpy.typing as npt

from tpi.errors import ModelError, WeightsError
from tpi.pack.blockfile import BlockShape, block_id
from tpi.pack.library.store import write_synced
from tpi.pack.manifest import MANIFEST, Manifest
from tpi.pack.reader import Bytes, Pack, PackBlock
from tpi.progress import Progress, silent
from tpi.system.private import private

I32 = npt.NDArray[np.int32]
SPARE = 64 << 20  # bytes of disk to leave free
_SLAB = 16 << 20  # bytes of units that are reordered at a time
_VECTORS = ("gate.bias", "up.bias")


def write_renumbered(pack: Pack, orders: Sequence[I32], directory: Path, progress: Progress = silent) -> None:
    """Write a copy of `pack` with renumbered neurons into `directory`, a new directory inside the pack's own.

    Memory use is about the size of one block.

    Args:
        pack: the original pack.
        orders: for each layer, int32 `[neurons]` with `order[new] = old`.
        directory: the directory to write into.
        progress: called with the bytes of feed-forward blocks written so far, and their total.

    Raises:
        ModelError: if an order is not a permutation of its layer's neurons, or neurons are not stored as records.
        WeightsError: if the disk has no room for the feed-forward blocks, or a block is damaged.
        OSError: if the disk cannot be written.
    """
    _check(pack, orders)
    total = ffn_bytes(pack)
    require_room(directory, total)
    done, shapes = 0, dict(pack.manifest.blocks)
    layers: list[tuple[str, ...]] = []
    for blocks, order in zip(pack.layers, orders, strict=True):
        names = [_write(block, order, directory) if block.kind == "ffn" else block.id for block in blocks]
        shapes |= {name: block.shape for name, block in zip(names, blocks, strict=True)}
        layers.append(tuple(names))
        progress(done := done + sum(block.shape.nbytes for block in blocks if block.kind == "ffn"), total)
    _finish(pack, replace(pack.manifest, blocks=shapes, layers=tuple(layers)), directory)


def ffn_bytes(pack: Pack) -> int:
    """Return the bytes of the feed-forward blocks of all layers: the additional disk space of a renumbered pack."""
    return sum(block.shape.nbytes for block in pack.walk() if block.kind == "ffn")


def require_room(directory: Path, nbytes: int) -> None:
    """Raise a WeightsError unless the disk of `directory` has room for `nbytes` and the spare 64 MiB."""
    free = disk_usage(directory).free
    if nbytes + SPARE > free:
        raise WeightsError(
            f"disk full: renumbered neurons take {nbytes >> 20} MiB, {SPARE >> 20} MiB must stay free, and "
            f"{directory.parent} has {free >> 20} MiB free; free some space, and profile the model again"
        )


def _check(pack: Pack, orders: Sequence[I32]) -> None:
    count = pack.config.intermediate
    if len(orders) != len(pack.layers) or any(sorted(order.tolist()) != list(range(count)) for order in orders):
        raise ModelError(f"an order is not a permutation of a layer's {count} neurons; profile the model again")
    for block in (block for block in pack.walk() if block.kind != "attention"):
        if block.kind != "ffn" or [(run.name, run.layout) for run in block.shape.runs] != [("neuron", "record")]:
            raise ModelError(f"{pack.path} does not store its neurons as records, so they cannot be renumbered")


def _write(block: PackBlock, order: I32, directory: Path) -> str:
    """Write a feed-forward block to `directory` with its neurons in the order `order`.

    Return the id of the new block.
    """
    shape, hashes = block.shape, []
    vectors = b"".join(_turned(name, values, order).tobytes() for name, values in block.vectors().items())
    unfinished = directory / "block.partial"
    with open(unfinished, "wb", opener=private) as file:
        file.write(shape.header)
        for units in _units(block, order):
            file.write(units.data)
            hashes += [sha256(unit.data).digest() for unit in units]
        file.write(facts := vectors + b"".join(hashes))
        file.flush()
        os.fsync(file.fileno())
    identity = block_id(shape.header, facts)
    unfinished.rename(directory / f"{identity}.safetensors")
    return identity


def _units(block: PackBlock, order: I32) -> Iterator[Bytes]:
    """Yield the units of `block` in the new order, several at a time, as `[n, unit_bytes]`.

    Padding stays at the end.
    """
    run = block.run("neuron")
    held = block.read_units("neuron", 0, run.units, check=True).reshape(-1, run.record_bytes)
    whole = np.concatenate([order, np.arange(len(order), len(held), dtype=np.int32)])
    step = max(1, _SLAB // run.unit_bytes) * run.width
    for first in range(0, len(held), step):
        yield held[whole[first : first + step]].reshape(-1, run.unit_bytes)


def _turned(name: str, values: npt.NDArray[np.float32], order: I32) -> npt.NDArray[np.float32]:
    return values[order] if name in _VECTORS else values


def _finish(pack: Pack, manifest: Manifest, directory: Path) -> None:
    """Link the files that the old and the new pack have in common into `directory`, then write the new manifest."""
    used = {name for names in manifest.layers for name in names}
    used |= {manifest.embedding, manifest.head, manifest.final, *filter(None, [manifest.positions])}
    for name in used:
        if not (directory / f"{name}.safetensors").exists():
            _share(pack.path / f"{name}.safetensors", directory)
    if manifest.tokenizer:
        _share(pack.tokenizer_file, directory)
    kept: dict[str, BlockShape] = {name: shape for name, shape in manifest.blocks.items() if name in used}
    write_synced(directory / MANIFEST, replace(manifest, blocks=kept).to_json().encode())


def _share(file: Path, directory: Path) -> None:
    """Link `file` into `directory`, a subdirectory of the file's directory.

    The file is copied if the file system has no links.
    """
    try:
        (directory / file.name).symlink_to(Path("..") / file.name)
    except OSError:
        copyfile(file, directory / file.name)
