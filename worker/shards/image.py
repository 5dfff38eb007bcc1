"""The shard image: one file with a node's units of one block.

    header (magic, format version, JSON length, JSON) | the block's vectors (f32) | zeros up to a 4 KiB boundary
    the units of every run, back to back | zeros up to a 4 KiB boundary

A file does not say to which layer it belongs. Its path in the cache is the block's id and the ranges of units.
"""

import json
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt

from scheduler.storage.extent import Extent
from tpi.devices.pages import round_up
from tpi.errors import TpiError, WeightsError
from tpi.net.fields import DIGEST_BYTES, RunOrVectors
from tpi.pack.layout import RunLayout
from worker.node_plan import NodeBlock

F32 = npt.NDArray[np.float32]

MAGIC = b"TPIshard"
VERSION = 1
_PREFIX = struct.Struct("<8sII")
_VECTORS_ALIGNMENT = 64
MAX_HEADER = 1 << 20
_LONGEST_NAME = 100  # characters; file systems allow 255, and suffixes are added


@dataclass(frozen=True)
class Piece:
    """The smallest part of an image with a hash: one unit, or all vectors of a block (run "vectors", unit 0)."""

    run: RunOrVectors
    unit: int
    offset: int  # in the image
    nbytes: int
    digest: bytes


@dataclass(frozen=True)
class HeldBlock:
    """One block of a node on this machine, complete and checked."""

    extent: Extent  # units of all runs, back to back
    vectors: dict[str, F32]
    remedy: str = "restart TPI to fetch it again"  # the advice in the message if the file is damaged

    def damaged(self, reason: str) -> WeightsError:
        """Return the error for a file that changed after its check, and make the next start check it again."""
        with suppress(OSError):
            os.utime(self.extent.path)  # now the time differs from the one that `worker.shards.cache` remembers
        return WeightsError(f"{self.extent.path} is damaged: {reason}; {self.remedy}")


@dataclass(frozen=True)
class StoredUnits:
    """Units `[first, last)` of a run in an existing file, and the offset of the first one."""

    run: str
    first: int
    last: int
    offset: int
    unit_bytes: int


def image_name(block: NodeBlock) -> str:
    """Return the file name of a block's image, made of its ranges of units."""
    name = "_".join(f"{run.name}.{run.units.first}-{run.units.last}" for run in block.runs)
    if len(name) > _LONGEST_NAME:  # for example, a slice of every expert
        name = f"slices.{sha256(name.encode()).hexdigest()}"
    return f"{name}.shard"


def image_header(block: NodeBlock) -> bytes:
    """Return the header of a block's image: magic, version, and JSON that lists the runs and vectors."""
    runs = [[run.layout.to_dict(), run.units.first, run.units.last] for run in block.runs]
    vectors = [[vector.name, vector.length] for vector in block.vectors]
    text = json.dumps({"block": block.id.hex(), "runs": runs, "vectors": vectors}, separators=(",", ":")).encode()
    return _PREFIX.pack(MAGIC, VERSION, len(text)) + text


def image_bytes(block: NodeBlock) -> int:
    """Return the size of a block's image in bytes, a multiple of the page size."""
    return round_up(_offsets(block)[1] + block.nbytes)


def image_pieces(block: NodeBlock) -> list[Piece]:
    """Return all pieces of a block's image, in the order of the file."""
    vectors_offset, offset = _offsets(block)
    found = []
    if block.vectors:
        found.append(Piece("vectors", 0, vectors_offset, block.vectors_bytes, block.vectors_hash))
    for run in block.runs:
        size = run.layout.unit_bytes
        for index in range(len(run.units)):
            digest = run.hashes[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
            found.append(Piece(run.name, run.units.first + index, offset, size, digest))
            offset += size
    return found


def image_token(block: NodeBlock) -> str:
    """Return the SHA-256, in hex, of the image's header and of the hashes of all pieces.

    Images with different content have different tokens.
    """
    parts = [image_header(block), block.vectors_hash, *(run.hashes for run in block.runs)]
    return sha256(b"".join(parts)).hexdigest()


def open_image(block: NodeBlock, path: Path) -> HeldBlock:
    """Return the block whose complete image is at `path`; read its vectors.

    Raises:
        WeightsError: if the file is unreadable, or if its vectors have changed.
    """
    vectors_offset, offset = _offsets(block)
    try:
        raw = np.fromfile(path, np.float32, block.vectors_bytes // 4, offset=vectors_offset)
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror}; remove it to fetch it again") from error
    extent = Extent(path, offset, block.nbytes)
    if sha256(raw.data).digest() != block.vectors_hash:
        raise HeldBlock(extent, {}).damaged("its vectors do not match their hash")
    return HeldBlock(extent, _split_vectors(block, raw))


def _offsets(block: NodeBlock) -> tuple[int, int]:
    """Return the byte offsets of the vectors and of the units in a block's image; the units start on a page."""
    vectors_offset = _vectors_offset(len(image_header(block)))
    return vectors_offset, round_up(vectors_offset + block.vectors_bytes)


def _split_vectors(block: NodeBlock, raw: F32) -> dict[str, F32]:
    """Return the vectors of a block by name. `raw` has the values of all vectors, back to back.

    Raises:
        WeightsError: if `raw` has the wrong length.
    """
    ends = np.cumsum([vector.length for vector in block.vectors], dtype=np.int64)
    if len(raw) != (ends[-1] if len(ends) else 0):
        raise WeightsError(f"block {block.id.hex()[:12]} has {len(raw)} values in its vectors instead of {ends[-1]}")
    parts = np.split(raw, ends[:-1]) if len(ends) else []
    return {vector.name: part for vector, part in zip(block.vectors, parts, strict=True)}


def stored_units(path: Path) -> Sequence[StoredUnits]:
    """Return the units that the header of the image at `path` lists; empty if this version cannot read the file."""
    try:
        with path.open("rb") as file:
            magic, version, size = _PREFIX.unpack(file.read(_PREFIX.size))
            if magic != MAGIC or version != VERSION or size > MAX_HEADER:
                return ()
            fields = json.loads(file.read(size))
        vectors_bytes = 4 * sum(int(length) for _, length in fields["vectors"])
        vectors_offset = _vectors_offset(_PREFIX.size + size)
        found = [StoredUnits("vectors", 0, 1, vectors_offset, vectors_bytes)]
        offset = round_up(vectors_offset + vectors_bytes)
        for run, first, last in fields["runs"]:
            layout = RunLayout.from_dict(run)
            found.append(StoredUnits(layout.name, first, last, offset, layout.unit_bytes))
            offset += (last - first) * layout.unit_bytes
    except (OSError, ValueError, TypeError, KeyError, ArithmeticError, struct.error, TpiError):
        return ()
    return found


def _vectors_offset(header_bytes: int) -> int:
    return -(-header_bytes // _VECTORS_ALIGNMENT) * _VECTORS_ALIGNMENT
