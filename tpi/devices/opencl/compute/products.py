"""Products of activations with packed weights, straight on the packed bytes: rows and columns, tiled and in records."""

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

_SIDE = 32  # tokens, and outputs, of a work-group in a prompt
_PASSES = (1, 4, 8)  # tokens for which weights are read once, where a step is short
_SPLIT = 32  # vectors that a work-group adds, at least, in columns of records
_MOST_SPLITS = 32


@dataclass(frozen=True)
class PackedPart:
    """One part of a run of units that lies on the card.

    Attributes:
        buffer, offset: where the part begins in the first unit; the offset in bytes.
    """

    run: RunLayout
    part: Part
    buffer: Any
    offset: Any

    @property
    def vectors(self) -> int:
        """How many vectors of `run.hidden` values there are."""
        return self.run.units * self.run.width

    @property
    def defined(self) -> str:
        """What its sources call its format."""
        return self.part.format.upper()


def matrix_of(card: OpenClCard, run: RunLayout, name: str, data: U8) -> PackedPart:
    """A part of a run whose units are `data`, of the card.

    Raises:
        KernelError: if the units do not lie as the format needs them: at multiples of 4 bytes in tiles and for float32.
    """
    buffer, start = card.located(data)
    part, offset = run.part(name), int(start) + run.part_offset(name)
    steps = (offset, run.unit_bytes, run.record_bytes if run.layout == "record" else 0)
    multiple = 4 if run.layout == "tiled" or part.format == "f32" else 2
    if any(step % multiple for step in steps):
        raise KernelError(f"{name} in {part.format} must lie at multiples of {multiple} bytes")
    return PackedPart(run, part, buffer, np.uint64(offset))


def rows(card: OpenClCard, matrix: PackedPart, x: CardActivations, active: Any = None, count: int = 0) -> Any:
    """`x` times every vector, `[tokens, vectors]`; `active`: a buffer of the `count` vectors to use, in records."""
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
    """`x` `[tokens, vectors]` times the vectors, `[tokens, hidden]`; `active` as for `rows`."""
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
    """Vectors dealt to work-groups, so that all of the card reads; then their sums, added."""
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
    assert form is not None  # what is tiled is quantised
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
    """Outputs, groups of inputs, and where squares lie (see `Squares` in tiles.cl)."""
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
    """The program for a short step, and how often it goes through the weights."""
    each = next((size for size in _PASSES if size >= tokens), _PASSES[-1])
    return Program((source,), (matrix.defined, f"TOKENS={each}")), -(-tokens // each)


def _program(source: str, matrix: PackedPart) -> Program:
    """The program for a prompt, which short steps of 1 have too."""
    return Program((source,), (matrix.defined, "TOKENS=1"))
