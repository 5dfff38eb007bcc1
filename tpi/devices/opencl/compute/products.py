"""Products of activations with packed weights, without unpacking them: rows and columns, tiled and in records."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpi.devices.opencl.card import LANES, OpenClCard
from tpi.devices.opencl.compute.activations import CardActivations, form_of
from tpi.devices.opencl.programs import Program
from tpi.errors import KernelError
from tpi.kernels.spec import STREAM_TOKENS, U8
from tpi.pack.layout import GROUP, GROUP_BYTES, TILE_OUTPUTS, Part, RunLayout

_SIDE = 32  # tokens, and outputs, of the tile that a work-group computes for prompts
_PASSES = (1, 4, 8)  # tokens for which weights are read once, for short steps
_SPLIT = 32  # least vectors that a work-group adds, for columns of records
_MOST_SPLITS = 32


@dataclass(frozen=True)
class PackedPart:
    """One part of a run of units on the card.

    Attributes:
        buffer: the buffer that holds the run.
        offset: bytes from the start of the buffer to the part in the first unit.
    """

    run: RunLayout
    part: Part
    buffer: Any
    offset: Any

    @property
    def vectors(self) -> int:
        """Number of vectors of `run.hidden` values."""
        return self.run.units * self.run.width

    @property
    def defined(self) -> str:
        """Name of the part's format in the OpenCL sources."""
        return self.part.format.upper()


def matrix_of(card: OpenClCard, run: RunLayout, name: str, data: U8) -> PackedPart:
    """Return a part of a run whose units are `data`, an array of the card.

    Raises:
        KernelError: if the units are not aligned for the format: to 4 bytes in tiles and for float32, else to 2.
    """
    buffer, start = card.located(data)
    part, offset = run.part(name), int(start) + run.part_offset(name)
    steps = (offset, run.unit_bytes, run.record_bytes if run.layout == "record" else 0)
    multiple = 4 if run.layout == "tiled" or part.format == "f32" else 2
    if any(step % multiple for step in steps):
        raise KernelError(f"{name} in {part.format} must be aligned to {multiple} bytes")
    return PackedPart(run, part, buffer, np.uint64(offset))


def rows(card: OpenClCard, matrix: PackedPart, x: CardActivations, active: Any = None, count: int = 0) -> Any:
    """Return the products of `x`, `[tokens, hidden]`, with every vector of the part, as a buffer `[tokens, vectors]`.

    `active` is a buffer with the numbers of the `count` vectors to use (record layout); None: all of them.
    """
    if matrix.run.layout == "tiled":
        return _tiled(card, matrix, x)
    form, vectors = form_of(matrix.run, matrix.part), matrix.vectors if active is None else count
    values, out = x.values if form is None else x.rounded(form).floats, card.empty(x.tokens, vectors)
    given = (*_records(matrix), active, vectors)
    if x.tokens >= STREAM_TOKENS:
        card.launch(_program("records", matrix), "record_prompt", _tiles(vectors, x), *given, 0, values, x.tokens, out)
    else:
        program, passes = _pass(matrix, "records", x.tokens)
        card.launch(program, "record_rows", [vectors, passes], *given, values, x.tokens, out)
    return out


def columns(card: OpenClCard, matrix: PackedPart, x: CardActivations, active: Any = None, count: int = 0) -> Any:
    """Return the sums of the part's vectors weighted by `x` `[tokens, vectors]`, as a buffer `[tokens, hidden]`.

    `active` and `count` are those of `rows`.
    """
    if matrix.run.layout == "tiled":
        return _tiled(card, matrix, x)
    hidden, vectors = matrix.run.hidden, matrix.vectors if active is None else count
    given = (*_records(matrix), active, vectors)
    if x.tokens < STREAM_TOKENS:
        return _columns_in_splits(card, matrix, x, given, vectors)
    out = card.empty(x.tokens, hidden)
    work = _tiles(hidden, x)
    card.launch(_program("records", matrix), "record_prompt", work, *given, 1, x.values, x.tokens, out)
    return out


def _columns_in_splits(
    card: OpenClCard, matrix: PackedPart, x: CardActivations, given: Sequence[Any], vectors: int
) -> Any:
    """Compute `columns` for few tokens in several work-groups, so that the whole card takes part.

    Each work-group adds some of the vectors, then the partial sums are added. `given` are the kernel's arguments that
    describe the part.
    """
    hidden, splits = matrix.run.hidden, max(1, min(vectors // _SPLIT, _MOST_SPLITS))
    program, passes = _pass(matrix, "records", x.tokens)
    partial, out = card.empty(splits, x.tokens, hidden), card.empty(x.tokens, hidden)
    work = [-(-hidden // (4 * LANES)), splits, passes]
    card.launch(program, "record_columns", work, *given, splits, x.values, x.tokens, partial)
    card.launch(program, "add_splits", [-(-x.tokens * hidden // LANES)], partial, splits, x.tokens * hidden, out)
    return out


def _tiled(card: OpenClCard, matrix: PackedPart, x: CardActivations) -> Any:
    outputs, groups, where = _squares(matrix)
    form = form_of(matrix.run, matrix.part)
    assert form is not None  # tiled parts are quantised
    rounded, out = x.rounded(form), card.empty(x.tokens, outputs)
    given = (rounded.codes, rounded.fine, rounded.scales, rounded.sums, x.tokens, out)
    if x.tokens >= STREAM_TOKENS:
        blocks, work = outputs // TILE_OUTPUTS, _tiles(outputs, x)
        card.launch(_program("tiles", matrix), "tile_prompt", work, *where, groups, blocks, *given)
    else:
        program, passes = _pass(matrix, "tiles", x.tokens)
        card.launch(program, "tile_vectors", [outputs // TILE_OUTPUTS, passes], *where, groups, *given)
    return out


def _squares(matrix: PackedPart) -> tuple[int, int, tuple[Any, ...]]:
    """Return the outputs, the groups of inputs, and the place of the squares (`Squares` in tiles.cl)."""
    run, row = matrix.run, matrix.part.axis == "row"
    outputs, inputs = (matrix.vectors, run.hidden) if row else (run.hidden, matrix.vectors)
    side = run.hidden if row else run.width  # inputs of a unit
    block_bytes = side // GROUP * TILE_OUTPUTS * GROUP_BYTES[matrix.part.format]
    split = (run.width // TILE_OUTPUTS, 0) if row else (0, run.width // GROUP)
    strides = (np.uint64(run.unit_bytes), np.uint64(block_bytes))
    return outputs, inputs // GROUP, (matrix.buffer, matrix.offset, *strides, *split)


def _records(matrix: PackedPart) -> tuple[Any, ...]:
    return matrix.buffer, matrix.offset, np.uint64(matrix.run.record_bytes), matrix.run.hidden


def _tiles(outputs: int, x: CardActivations) -> list[int]:
    return [-(-outputs // _SIDE), -(-x.tokens // _SIDE)]


def _pass(matrix: PackedPart, source: str, tokens: int) -> tuple[Program, int]:
    """Return the program for a step of few tokens, and the number of times that it reads the weights."""
    each = next((size for size in _PASSES if size >= tokens), _PASSES[-1])
    return Program(_sources(source), (matrix.defined, f"TOKENS={each}")), -(-tokens // each)


def _program(source: str, matrix: PackedPart) -> Program:
    """Return the program that contains the kernel for prompts.

    Its sources also contain the kernels for short steps, which need a definition of TOKENS; here it is 1.
    """
    return Program(_sources(source), (matrix.defined, "TOKENS=1"))


def _sources(source: str) -> tuple[str, ...]:
    return ("formats", source) if source == "tiles" else (source,)
