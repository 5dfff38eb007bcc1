"""The shard image, one file with a node's units of one block, and the plan of its contents.

    header (magic, format version, JSON length, JSON) | the block's vectors (f32) | zeros up to a 4 KiB boundary
    the units of every run, back to back | zeros up to a 4 KiB boundary

A file does not say to which layer it belongs. Its path in the cache is the block's id and the ranges of units.
"""

import json
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt

from scheduler.storage.extent import Extent
from tpi.devices.pages import round_up
from tpi.errors import TpiError, WeightsError
from tpi.net.fields import DIGEST_BYTES, RunOrVectors
from tpi.net.messages import Assign, BlockPlan
from tpi.pack.layout import RunLayout

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
class HeldRun:
    """Units `first` to `last` (exclusive) of a run, and the offset of the first unit in the image, in bytes."""

    layout: RunLayout
    first: int
    last: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of these units."""
        return (self.last - self.first) * self.layout.unit_bytes


@dataclass(frozen=True)
class HeldBlock:
    """One block of a node, complete and checked."""

    id: bytes
    extent: Extent  # units of all runs, back to back
    vectors: dict[str, F32]
    remedy: str = "restart TPI to fetch it again"  # the advice in the message if the file is damaged

    def damaged(self, reason: str) -> WeightsError:
        """Return the error for a file that changed after it was checked, and have the next start check it again."""
        with suppress(OSError):
            os.utime(self.extent.path)  # now the time differs from the one that `worker.shards.cache` remembers
        return WeightsError(f"{self.extent.path} is damaged: {reason}; {self.remedy}")


@dataclass(frozen=True)
class ImagePlan:
    """One block of an `Assign`, with the layouts of its runs."""

    block: BlockPlan
    layouts: tuple[RunLayout, ...]  # one per run of the block

    @property
    def id(self) -> str:
        """The block's content address, 64 hex digits."""
        return self.block.id.hex()

    @property
    def name(self) -> str:
        """File name of the image, made of its ranges of units."""
        runs = zip(self.block.runs, self.layouts, strict=True)
        name = "_".join(f"{layout.name}.{run.first}-{run.last}" for run, layout in runs)
        if len(name) > _LONGEST_NAME:  # for example, a slice of every expert
            name = f"slices.{sha256(name.encode()).hexdigest()}"
        return f"{name}.shard"

    @cached_property
    def header(self) -> bytes:
        """Header of the file: magic, version, and JSON that lists the runs and vectors."""
        runs = [
            [layout.to_dict(), run.first, run.last] for run, layout in zip(self.block.runs, self.layouts, strict=True)
        ]
        vectors = [[vector.name, vector.length] for vector in self.block.vectors]
        text = json.dumps({"block": self.id, "runs": runs, "vectors": vectors}, separators=(",", ":")).encode()
        return _PREFIX.pack(MAGIC, VERSION, len(text)) + text

    @property
    def vectors_offset(self) -> int:
        """Offset of the vectors in the file."""
        return _vectors_offset(len(self.header))

    @property
    def vectors_bytes(self) -> int:
        """Bytes of all vectors."""
        return 4 * sum(vector.length for vector in self.block.vectors)

    @property
    def data_offset(self) -> int:
        """Offset of the units in the file, a multiple of the page size."""
        return round_up(self.vectors_offset + self.vectors_bytes)

    @cached_property
    def runs(self) -> tuple[HeldRun, ...]:
        """All runs, with their offsets in the file."""
        found = []
        offset = self.data_offset
        for run, layout in zip(self.block.runs, self.layouts, strict=True):
            found.append(HeldRun(layout, run.first, run.last, offset))
            offset += found[-1].nbytes
        return tuple(found)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces of the image, in the order of the file."""
        return tuple(self._pieces())

    @property
    def data_bytes(self) -> int:
        """Bytes of the units."""
        return sum(run.nbytes for run in self.runs)

    @property
    def file_bytes(self) -> int:
        """Size of the file in bytes, a multiple of the page size."""
        return round_up(self.data_offset + self.data_bytes)

    @cached_property
    def token(self) -> str:
        """SHA-256 of the header and of the hashes of all pieces, in hex; differs for images of other content."""
        parts = [self.header, self.block.vectors_hash, *(run.hashes for run in self.block.runs)]
        return sha256(b"".join(parts)).hexdigest()

    def held(self, path: Path) -> HeldBlock:
        """Return the block whose complete image is at `path`; read its vectors.

        Raises:
            WeightsError: if the file is unreadable, or if its vectors have changed.
        """
        try:
            raw = np.fromfile(path, np.float32, self.vectors_bytes // 4, offset=self.vectors_offset)
        except OSError as error:
            raise WeightsError(f"cannot read {path}: {error.strerror}; remove it to fetch it again") from error
        extent = Extent(path, self.data_offset, self.data_bytes)
        if sha256(raw.data).digest() != self.block.vectors_hash:
            raise HeldBlock(self.block.id, extent, {}).damaged("its vectors do not match their hash")
        return HeldBlock(self.block.id, extent, split_vectors(self.block, raw))

    def _pieces(self) -> Iterator[Piece]:
        if self.block.vectors:
            yield Piece("vectors", 0, self.vectors_offset, self.vectors_bytes, self.block.vectors_hash)
        for run, plan in zip(self.runs, self.block.runs, strict=True):
            size = run.layout.unit_bytes
            for index in range(run.last - run.first):
                digest = plan.hashes[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
                yield Piece(run.layout.name, run.first + index, run.offset + index * size, size, digest)


@dataclass(frozen=True)
class StoredUnits:
    """Units `[first, last)` of a run in an existing file, and the offset of the first one."""

    run: str
    first: int
    last: int
    offset: int
    unit_bytes: int


def image_plans(assign: Assign) -> list[ImagePlan]:
    """Return a plan for each distinct block of `assign`, in the same order."""
    return [ImagePlan(block, tuple(assign.layouts[run.layout] for run in block.runs)) for block in assign.blocks]


def split_vectors(block: BlockPlan, raw: F32) -> dict[str, F32]:
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
