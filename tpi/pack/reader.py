"""Reader of packs: the manifest, and blocks of weights by ranges of units. Imports neither torch nor transformers."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tpi.config import Format, ModelConfig
from tpi.errors import ModelError, WeightsError
from tpi.pack.blockfile import HASH_BYTES, BlockShape, block_id, damaged_unit
from tpi.pack.layout import BlockKind, RunLayout
from tpi.pack.manifest import MANIFEST, Manifest

Bytes = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

_VERIFY_BYTES = 16 << 20  # bytes of units checked at a time
_FORGOTTEN_BYTES = 256 << 10  # reads of at least this size are dropped from the page cache: weights are read once


class PackBlock:
    """One block of a pack: the attention or feed-forward half of a layer, a table, or vectors alone."""

    def __init__(self, path: Path, identity: str, shape: BlockShape) -> None:
        self.path = path
        self.id = identity
        self.shape = shape
        self._checked = False

    @property
    def kind(self) -> BlockKind:
        """Kind of the block: attention, ffn, experts, table or vectors."""
        return self.shape.kind

    def run(self, name: str) -> RunLayout:
        """Return the layout of the run called `name`, such as query, kv, neuron or row.

        Raises:
            KeyError: if the block has no such run.
        """
        return self.shape.run(name)

    def offset(self, run: str, unit: int = 0) -> int:
        """Return the offset in the file, in bytes, of a unit of a run; by default of the first one.

        Raises:
            KeyError: if the block has no such run.
        """
        return self.shape.ranges[run][0] + unit * self.run(run).unit_bytes

    def read_units(self, run: str, first: int, last: int, check: bool = False) -> Bytes:
        """Read units `[first, last)` of a run as uint8 `[last - first, unit_bytes]`.

        Raises:
            WeightsError: if the run does not have these units; if the file is missing or too short, or its header is
                wrong; if `check` is True and a unit does not match its hash.
        """
        layout = self.run(run)
        if not 0 <= first <= last <= layout.units:
            raise WeightsError(f"units {first} to {last} of {run} do not exist in {self.path}; it has {layout.units}")
        units = np.empty((last - first, layout.unit_bytes), np.uint8)
        self._read(self.offset(run, first), units)
        if check:
            self._compare(run, first, units, self._vectors_and_hashes())
        return units

    def verifier(self, run: str) -> Callable[[int, Bytes], None]:
        """Return a function `check(first, data)` that compares units of a run in memory with their hashes.

        `first` is the index of the first unit, and `data` holds the bytes of the units, back to back. `check` raises
        WeightsError if a unit does not match.

        Raises:
            WeightsError: if the file is missing, or its vectors and hashes do not match its name.
        """
        stored, unit_bytes = self._vectors_and_hashes(), self.run(run).unit_bytes
        return lambda first, data: self._compare(run, first, data.reshape(-1, unit_bytes), stored)

    def vectors(self) -> dict[str, F32]:
        """Read the small float32 vectors (norms, biases, router) by name.

        Raises:
            WeightsError: if the file is missing, or its vectors and hashes do not match its name.
        """
        stored = self._vectors_and_hashes()
        return {name: stored[name].view(np.float32).copy() for name, _ in self.shape.vectors}

    def unit_hashes(self, run: str) -> Bytes:
        """Read the SHA-256 of every unit of a run, uint8 `[units, 32]`.

        Raises:
            WeightsError: if the file is missing, or its vectors and hashes do not match its name.
        """
        hashes: Bytes = self._vectors_and_hashes()[f"{run}.hash"].reshape(-1, HASH_BYTES).copy()
        return hashes

    def verify(self) -> None:
        """Read the whole file and compare it with its hashes.

        Raises:
            WeightsError: if a byte has changed; the message names the file.
        """
        stored = self._vectors_and_hashes()
        for run in self.shape.runs:
            step = max(1, _VERIFY_BYTES // run.unit_bytes)
            for first in range(0, run.units, step):
                units = self.read_units(run.name, first, min(first + step, run.units))
                self._compare(run.name, first, units, stored)

    def _compare(self, run: str, first: int, units: Bytes, stored: Mapping[str, Bytes]) -> None:
        hashes = stored[f"{run}.hash"][first * HASH_BYTES : (first + len(units)) * HASH_BYTES]
        index = damaged_unit(_flat(units), hashes.tobytes())
        if index is not None:
            raise self.damaged(f"unit {first + index} of {run} does not match its hash")

    def _vectors_and_hashes(self) -> dict[str, Bytes]:
        """Read the bytes of all vectors and hashes, by tensor name. They are all of the block except its units."""
        begin = self.shape.tail_offset
        tail = np.empty(self.shape.nbytes - begin, np.uint8)
        self._read(begin, tail)
        if block_id(self.shape.header, tail.tobytes()) != self.id:
            raise self.damaged("its content does not match its name")
        ranges = self.shape.ranges.items()
        return {name: tail[at - begin : at - begin + nbytes] for name, (at, nbytes) in ranges if at >= begin}

    def _read(self, offset: int, out: npt.NDArray[Any]) -> None:
        """Fill `out` from the file at `offset`. The first read also checks the file's header and size."""
        try:
            with self.path.open("rb", buffering=0) as file:
                if not self._checked:
                    self._check(file.read(len(self.shape.header)), os.fstat(file.fileno()).st_size)
                file.seek(offset)
                view = _flat(out)
                while len(view):
                    count = file.readinto(view)
                    if not count:
                        raise self.damaged("it is too short")
                    view = view[count:]
                if out.nbytes >= _FORGOTTEN_BYTES and hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), offset, out.nbytes, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise WeightsError(f"cannot read {self.path}: {error.strerror or error}; pack the model again") from error

    def _check(self, header: bytes, size: int) -> None:
        if size != self.shape.nbytes:
            raise self.damaged(f"it has {size} bytes instead of {self.shape.nbytes}")
        if header != self.shape.header:
            raise self.damaged("its header does not match the manifest")
        self._checked = True

    def damaged(self, reason: str) -> WeightsError:
        """Return the error for a damaged file. Also touch the file, so that the next start checks and repairs it."""
        with suppress(OSError):
            os.utime(self.path)  # the recorded times no longer match, so the next start does not skip the check
        return WeightsError(f"{self.path} is damaged: {reason}; run the command again to repair it")


def _flat(array: npt.NDArray[Any]) -> memoryview:
    return array.data.cast("B") if array.size else memoryview(b"")


class Pack:
    """A model as a directory: manifest, tokenizer, and one file per distinct block."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        blocks = {name: PackBlock(path / f"{name}.safetensors", name, shape) for name, shape in manifest.blocks.items()}
        self.blocks: Mapping[str, PackBlock] = blocks  # by id; equal blocks of several layers are one
        self.layers = tuple(tuple(blocks[name] for name in names) for names in manifest.layers)  # in order of use
        self.embedding = blocks[manifest.embedding]  # run `row`; zero rows pad the vocabulary to whole units
        self.head = blocks[manifest.head]  # the same block as `embedding` if the model's embeddings are tied
        self.positions = blocks[manifest.positions] if manifest.positions else None  # run `row` (OPT)
        self.per_layer = tuple(blocks[name] for name in manifest.per_layer)  # run `row`: a table, and its projection
        self.mtp = tuple(blocks[name] for name in manifest.mtp)  # a projection, norms, and the blocks of a layer
        self.final = blocks[manifest.final]  # vectors norm and, for LayerNorm, norm.bias

    @classmethod
    def open(cls, path: Path) -> "Pack":
        """Open the pack in directory `path`: read the manifest and check the size of every block file.

        Raises:
            ModelError: if it is not a pack, has another version, or its manifest is damaged.
            WeightsError: if a block file is missing or has the wrong size.
        """
        pack = cls(path, Manifest.load(path / MANIFEST))
        for block in pack.blocks.values():
            try:
                size = block.path.stat().st_size
            except OSError:
                raise WeightsError(f"{block.path} is missing; delete the pack and make it again") from None
            if size != block.shape.nbytes:
                raise WeightsError(
                    f"{block.path} has {size} bytes instead of {block.shape.nbytes}; make the pack again"
                )
        return pack

    @property
    def config(self) -> ModelConfig:
        """Configuration of the model: its sizes and options."""
        return self.manifest.config

    @property
    def dtype(self) -> str:
        """Value of `--dtype` that the pack was made with."""
        return self.manifest.dtype

    @property
    def format(self) -> Format:
        """Weight format of most bytes of the layers."""
        sizes: Counter[Format] = Counter()
        for block in self.walk():
            for run in block.shape.runs:
                for part in run.parts:
                    sizes[part.format] += run.units * run.width * part.vector_bytes(run.hidden)
        return sizes.most_common(1)[0][0]

    @property
    def tokenizer_info(self) -> Mapping[str, Any]:
        """Metadata from `tpi.pack.builder.tokens`: tokens, ids and chat templates. Empty if there is no tokenizer."""
        return self.manifest.tokenizer

    @property
    def tokenizer_file(self) -> Path:
        """Path of the model's tokenizer.json.

        Raises:
            ModelError: if the model was packed without a tokenizer.
        """
        if not self.manifest.tokenizer:
            raise ModelError(f"{self.path} has no tokenizer; put tokenizer.json next to the model and pack it again")
        return self.path / "tokenizer.json"

    @property
    def weight_bytes(self) -> int:
        """Size in bytes of all weights. A block that several layers share counts once for each of them."""
        used = [block for layer in self.layers for block in layer] + [self.embedding, self.final, *self.per_layer]
        used += [block for block in (None if self.head is self.embedding else self.head, self.positions) if block]
        return sum(block.shape.nbytes for block in used)

    def walk(self) -> Iterator[PackBlock]:
        """Yield the blocks of all layers in the order in which they are computed."""
        for layer in self.layers:
            yield from layer

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Check every byte of every block against its hashes; call `progress(bytes_done, total_bytes)` as it goes on.

        Raises:
            WeightsError: if a file is damaged; the message names the first one.
        """
        total, done = sum(block.shape.nbytes for block in self.blocks.values()), 0
        for block in self.blocks.values():
            block.verify()
            done += block.shape.nbytes
            if progress:
                progress(done, total)


def is_pack(path: Path) -> bool:
    """Return True if `path` is a directory with a manifest."""
    return (path / MANIFEST).is_file()
