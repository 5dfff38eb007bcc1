"""Format of a block file: the tensors of its safetensors file, and the byte range of each. This module does no I/O.

The header depends only on the block's shape, so a reader checks a file by comparing its first bytes. The data starts on
a 4 KiB boundary, in this order: for each run `<run>`, uint8 [units, unit_bytes]; the vectors, float32; for each run
`<run>.hash`, uint8 [units, 32], the SHA-256 of each unit's bytes. No tensor name mentions the layer, so equal blocks
are equal files.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any, get_args

from tpi.errors import ModelError
from tpi.pack.layout import GROUP_BYTES, Axis, BlockKind, Layout, RunLayout, RunName

HASH_BYTES = 32
ALIGNMENT = 4096  # bytes; the data starts at a multiple of this offset


@dataclass(frozen=True)
class BlockShape:
    """The contents of a block: its runs, and the name and length (in values) of each of its float32 vectors."""

    kind: BlockKind
    runs: tuple[RunLayout, ...]
    vectors: tuple[tuple[str, int], ...]

    @cached_property
    def header(self) -> bytes:
        """First bytes of the file: the safetensors length and JSON, padded to a multiple of `ALIGNMENT`."""
        runs = json.dumps([run.to_dict() for run in self.runs], separators=(",", ":"))
        tensors: dict[str, Any] = {"__metadata__": {"tpi": self.kind, "runs": runs}}
        offset = 0
        for name, dtype, shape, nbytes in self._tensors():
            tensors[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + nbytes]}
            offset += nbytes
        text = json.dumps(tensors, separators=(",", ":")).encode()
        padded = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT - 8
        return padded.to_bytes(8, "little") + text.ljust(padded)

    @cached_property
    def ranges(self) -> dict[str, tuple[int, int]]:
        """Byte range of each tensor: its name to (offset in the file, number of bytes)."""
        offset = len(self.header)
        found = {}
        for name, _, _, nbytes in self._tensors():
            found[name] = (offset, nbytes)
            offset += nbytes
        return found

    @property
    def nbytes(self) -> int:
        """Size of the whole file in bytes."""
        return len(self.header) + sum(nbytes for *_, nbytes in self._tensors())

    @property
    def tail_offset(self) -> int:
        """Offset in the file where the vectors and hashes begin.

        The name of the block is a hash of the header, the vectors and the hashes.
        """
        return len(self.header) + sum(run.units * run.unit_bytes for run in self.runs)

    def run(self, name: str) -> RunLayout:
        """Return the layout of the run called `name`.

        Raises:
            KeyError: if the block has no such run.
        """
        found: dict[str, RunLayout] = {run.name: run for run in self.runs}
        return found[name]

    def to_dict(self) -> dict[str, Any]:
        """Return the shape as JSON types, for the manifest."""
        vectors = [[name, length] for name, length in self.vectors]
        return {"kind": self.kind, "runs": [run.to_dict() for run in self.runs], "vectors": vectors}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "BlockShape":
        """Build a shape from the fields that `to_dict` returns.

        Raises:
            ModelError, KeyError, TypeError, ValueError: if the fields do not describe a block.
        """
        if any(run["name"] == "gate" for run in fields["runs"]):
            raise ModelError("it was made with tpi pack --gate-first, which this version does not have")
        runs = tuple(RunLayout.from_dict(run) for run in fields["runs"])
        vectors = tuple((str(name), int(length)) for name, length in fields["vectors"])
        if fields["kind"] not in get_args(BlockKind) or not all(0 < length < 1 << 24 for _, length in vectors):
            raise ModelError(f"{fields['kind']!r} is not a kind of block that this version knows")
        for run in runs:
            _check_run(run)
        return cls(fields["kind"], runs, vectors)

    def _tensors(self) -> Iterator[tuple[str, str, list[int], int]]:
        for run in self.runs:
            yield run.name, "U8", [run.units, run.unit_bytes], run.units * run.unit_bytes
        for name, length in self.vectors:
            yield name, "F32", [length], 4 * length
        for run in self.runs:
            yield f"{run.name}.hash", "U8", [run.units, HASH_BYTES], run.units * HASH_BYTES


def _check_run(run: RunLayout) -> None:
    numbers = all(type(number) is int and 0 < number < 1 << 24 for number in (run.width, run.hidden, run.units))
    known = run.layout in get_args(Layout) and run.name in get_args(RunName) and run.parts
    if (
        not numbers
        or not known
        or not all(part.format in GROUP_BYTES and part.axis in get_args(Axis) for part in run.parts)
    ):
        raise ModelError(
            f"the file has a run of layout {run.layout!r}, which this version does not know; make the pack again"
        )


def block_id(header: bytes, small: bytes) -> str:
    """Return the content address of a block: 64 hex digits that depend on every byte of the file.

    The units count through their hashes. `small` holds the bytes of the vectors and hashes, as in the file.
    """
    return sha256(header + small).hexdigest()


def damaged_unit(units: memoryview, hashes: bytes) -> int | None:
    """Return the index of the first unit that does not match its hash; None if all match.

    Args:
        units: equally large units, back to back.
        hashes: the SHA-256 of each unit, 32 bytes each, back to back.
    """
    count = len(hashes) // HASH_BYTES
    size = len(units) // max(1, count)
    for index in range(count):
        digest = sha256(units[index * size : (index + 1) * size]).digest()
        if digest != hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]:
            return index
    return None
