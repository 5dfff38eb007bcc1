"""Writer of block files: reads slabs of the source, encodes units, hashes them, and names the file by its content."""

import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import IO

import numpy as np
import numpy.typing as npt

from tpi.errors import ModelError
from tpi.families.base import Ref
from tpi.pack.blockfile import BlockShape, block_id
from tpi.pack.builder.matrix import Slab, matrix, vector
from tpi.pack.builder.plan import BlockRecipe, RunRecipe
from tpi.pack.builder.quantise import assemble, decode_part, encode_gguf_part, encode_part
from tpi.pack.groups import group_factors
from tpi.pack.layout import Part, RunLayout, RunName, is_quantised
from tpi.progress import Progress, silent
from tpi.sources.base import Source
from tpi.system.private import private

F32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

Importance = Mapping[tuple[RunName, int, str], F32]
"""The importance of the errors of a block's weights, by run, piece and part: float32, for each input of the matrix.

The inputs of a row part are the values of a vector, those of a column part are its vectors.
"""
NO_IMPORTANCE: Importance = {}
SLAB_BYTES = 32 << 20  # size of a slab: the larger of its bytes in the source and in units, all parts together
STEP_VALUES = 1 << 19  # weights of a part encoded by one task; temporaries take about 40 bytes for each weight
_MATRICES = frozenset({  # stored as vectors, row by row
    "router", "a", "b", "conv", "conv.q", "conv.k", "conv.v", "decay", "skip", "out_norm",
    "per_layer.gate", "per_layer.projection",
})  # fmt: skip


class Losses:
    """Sums of squared errors and squared weights, for weights converted from one quantised format to another."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._lock = Lock()

    def add(self, kind: tuple[str, str], before: F32, after: F32) -> None:
        """Add weights that were converted from the source's format `kind[0]` to the pack's format `kind[1]`.

        `before` and `after` are their dequantised values.
        """
        error = float(np.square(before - after).sum(dtype=np.float64))
        power = float(np.square(before).sum(dtype=np.float64))
        with self._lock:
            sums = self._sums[kind]
            sums[0] += error
            sums[1] += power

    def report(self) -> str:
        """Return a line of text with the relative RMS error of each conversion; empty if there was none."""
        if not self._sums:
            return ""
        made = [
            f"{before} as {after}, relative RMS error {math.sqrt(error / power) if power else 0:.1%}"
            for (before, after), (error, power) in sorted(self._sums.items())
        ]
        return f"re-quantised: {'; '.join(made)}"


class BlockWriter:
    """Writer of a model's blocks into a directory. Equal blocks are written once."""

    def __init__(self, source: Source, directory: Path, progress: Progress = silent, total: int = 0) -> None:
        """Create a writer. `progress` is called with the bytes written so far and `total`."""
        self.losses = Losses()
        self.shapes: dict[str, BlockShape] = {}
        self._source, self._directory = source, directory
        self._progress, self._done, self._total = progress, 0, total
        self._known: dict[BlockRecipe, str] = {}
        self._pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="pack")

    def __enter__(self) -> "BlockWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def write(self, plan: BlockRecipe, importance: Importance = NO_IMPORTANCE) -> str:
        """Write one block, unless an equal one was written before, and return its id.

        `importance` weights the errors of the parts that it names when they are quantised. In other parts, all errors
        count alike.

        Raises:
            ModelError: if a tensor is missing or damaged.
            OSError: if the disk is full or cannot be written.
        """
        if plan not in self._known:
            self._known[plan] = self._write(plan, importance)
        return self._known[plan]

    def _write(self, plan: BlockRecipe, importance: Importance) -> str:
        shape = plan.shape
        unfinished = self._directory / "block.partial"
        with open(unfinished, "wb", opener=private) as file:
            file.write(shape.header)
            hashes = b"".join([self._write_run(file, run, importance) for run in plan.runs])
            vectors = b"".join([self._vector(*item) for item in plan.vectors])
            file.write(vectors + hashes)
            file.flush()
            os.fsync(file.fileno())
        identity = block_id(shape.header, vectors + hashes)
        unfinished.rename(self._directory / f"{identity}.safetensors")
        self.shapes[identity] = shape
        return identity

    def _write_run(self, file: IO[bytes], plan: RunRecipe, importance: Importance) -> bytes:
        """Write all units of a run to `file`, and return the hashes of the units, back to back."""
        hashes = []
        for units, digests in self._encoded(plan, importance):
            file.write(units.data)
            self._done += units.nbytes
            self._progress(self._done, self._total)
            hashes.append(digests)
        return b"".join(hashes)

    def _encoded(self, plan: RunRecipe, importance: Importance) -> Iterator[tuple[Bytes, bytes]]:
        """Yield the units of a run in order, several at a time: `[n, unit_bytes]`, and their hashes, n * 32 bytes."""
        run = plan.piece
        step = max(1, STEP_VALUES // (run.width * run.hidden))
        for number, refs in enumerate(plan.pieces):
            weights = {part.name: importance.get((run.name, number, part.name)) for part in run.parts}
            for first, last, slabs in read_slabs(self._source, run, refs, plan.vectors):
                starts = range(first, last, step)
                yield from self._pool.map(partial(self._encode, run, slabs, weights, last, step), starts)
                del slabs  # free the memory before the next slabs are read

    def _encode(
        self, run: RunLayout, slabs: list[Slab], weights: Mapping[str, F32 | None], end: int, step: int, first: int
    ) -> tuple[Bytes, bytes]:
        """Encode units `[first, min(first + step, end))` from the slabs that hold them; return units and hashes.

        `weights` has the importance of the errors of each part, by its name.
        """
        last = min(first + step, end)
        bounds = (first * run.width, last * run.width)
        pairs = list(zip(run.parts, slabs, strict=True))
        units = assemble(
            run, {part.name: self._part(part, run, slab, weights[part.name], *bounds) for part, slab in pairs}
        )
        rounded = any(slab.element.rounded for slab in slabs)
        for part, slab in pairs:
            if rounded and is_quantised(part.format) and not _keeps_codes(part, run, slab):
                self.losses.add((slab.element.name, part.format), slab.values(*bounds), decode_part(part, run, units))
        return units, b"".join(sha256(unit.data).digest() for unit in units)

    def _vector(self, name: str, ref: Ref, length: int) -> bytes:
        values = read_vector(self._source, name, ref, length)
        self._require_finite(values, name)
        return values.astype("<f4").tobytes()

    def _part(self, part: Part, run: RunLayout, slab: Slab, weights: F32 | None, first: int, last: int) -> Bytes:
        """Encode one part of the units from `first` to `last`.

        The codes of the source are copied if the format and the layout allow it. Otherwise the values are quantised
        again.
        """
        if _keeps_codes(part, run, slab):
            groups = slab.groups(first, last)
            self._require_finite(group_factors(part.format, groups), part.name)
            return encode_gguf_part(replace(part, axis=slab.axis), run, groups)
        values = slab.values(first, last)
        self._require_finite(values, part.name)
        if weights is not None and part.axis == "column":
            weights = weights[first:last]
        return encode_part(part, run, values, weights)

    def _require_finite(self, values: F32, name: str) -> None:
        if not np.isfinite(values).all():
            raise ModelError(f"{self._source.label}: weights of {name} are infinite or NaN; get the file again")


def read_slabs(
    source: Source, run: RunLayout, refs: Sequence[Ref], vectors: int, first: int = 0, last: int | None = None
) -> Iterator[tuple[int, int, list[Slab]]]:
    """Yield the matrices of one piece of a run in slabs: the first unit, the end of the units, a slab of each part.

    Args:
        source: the model's files.
        run: the layout of the piece.
        refs: the matrix of each part.
        vectors: the number of vectors of each matrix; units beyond are padded.
        first, last: the units to read, by default all of the piece.

    Raises:
        ModelError: if a tensor is missing or has another shape.
    """
    last = run.units if last is None else last
    matrices = [matrix(source, ref, part.axis, vectors, run.hidden) for part, ref in zip(run.parts, refs, strict=True)]
    source_bytes = run.width * sum(item.vector_bytes for item in matrices)
    step = max(1, SLAB_BYTES // max(source_bytes, run.unit_bytes))
    for at in range(first, last, step):
        end = min(at + step, last)
        yield at, end, [item.load(at * run.width, end * run.width) for item in matrices]


def read_vector(source: Source, name: str, ref: Ref, length: int) -> F32:
    """Read the vector of a block called `name`; raise ModelError unless it has `length` values."""
    values = vector(source, ref, flat=name in _MATRICES or name.endswith(".biases"))
    if len(values) != length:
        raise ModelError(f"{source.label}: vector {name} has {len(values)} values instead of {length}")
    return values


def _keeps_codes(part: Part, run: RunLayout, slab: Slab) -> bool:
    """Return True if the source's codes can be copied: they have the part's format, and groups along the same axis."""
    if not slab.element.quantised or slab.element.nearest != part.format:
        return False
    return slab.axis == (part.axis if run.layout == "tiled" else "row")
