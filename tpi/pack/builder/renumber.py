"""A pack with its neurons in another order: each neuron's record is copied as it is, its biases go with it.

A record has scales of its own, so nothing is rounded anew: the two packs compute the same, but for the order of sums.
What is no feed-forward network is the file of the pack it is made from.
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
SPARE = 64 << 20  # bytes of disk that stay free
_SLAB = 16 << 20  # bytes of units that are put together at a time
_VECTORS = ("gate.bias", "up.bias")


def write_renumbered(pack: Pack, orders: Sequence[I32], directory: Path, progress: Progress = silent) -> None:
    """Write `pack` into `directory`, a new one inside the pack's own, with the neurons of each layer in its order.

    It needs the memory of one block. `progress` is told how many bytes of feed-forward blocks are written.

    Args:
        orders: `order[new] = old`, int32 `[neurons]`, of each layer.

    Raises:
        ModelError: if an order is no permutation of its layer's neurons, or a layer has no records of neurons.
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
    """Bytes of the feed-forward blocks of all layers: what a renumbered pack takes beside the one it is made from."""
    return sum(block.shape.nbytes for block in pack.walk() if block.kind == "ffn")


def require_room(directory: Path, nbytes: int) -> None:
    """Raise a WeightsError unless the disk of `directory` has room for so many bytes."""
    free = disk_usage(directory).free
    if nbytes + SPARE > free:
        raise WeightsError(
            f"disk full: renumbered neurons take {nbytes >> 20} MiB, {SPARE >> 20} have to stay free, and "
            f"{directory.parent} has {free >> 20} MiB free; free some, and profile the model again"
        )


def _check(pack: Pack, orders: Sequence[I32]) -> None:
    count = pack.config.intermediate
    if len(orders) != len(pack.layers) or any(sorted(order.tolist()) != list(range(count)) for order in orders):
        raise ModelError(f"an order is no permutation of a layer's {count} neurons; profile the model again")
    for block in (block for block in pack.walk() if block.kind != "attention"):
        if block.kind != "ffn" or [(run.name, run.layout) for run in block.shape.runs] != [("neuron", "record")]:
            raise ModelError(f"{pack.path} has neurons that are no records, and cannot be renumbered")


def _write(block: PackBlock, order: I32, directory: Path) -> str:
    """One feed-forward block in another order; returns its id."""
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
    """Its units in the new order, some at a time: `[n, unit_bytes]`. What fills the last one up stays where it is."""
    run = block.run("neuron")
    held = block.read_units("neuron", 0, run.units, check=True).reshape(-1, run.record_bytes)
    whole = np.concatenate([order, np.arange(len(order), len(held), dtype=np.int32)])
    step = max(1, _SLAB // run.unit_bytes) * run.width
    for first in range(0, len(held), step):
        yield held[whole[first : first + step]].reshape(-1, run.unit_bytes)


def _turned(name: str, values: npt.NDArray[np.float32], order: I32) -> npt.NDArray[np.float32]:
    return values[order] if name in _VECTORS else values


def _finish(pack: Pack, manifest: Manifest, directory: Path) -> None:
    """What all packs of a model have alike, and the manifest last."""
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
    """The same file in a directory inside its own; a copy where the file system knows no links."""
    try:
        (directory / file.name).symlink_to(Path("..") / file.name)
    except OSError:
        copyfile(file, directory / file.name)
