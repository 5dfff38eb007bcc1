"""Access to the weights of a source as floats, in units that kernels compute with. Nothing is quantised."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tpi.config import Format
from tpi.pack.builder.matrix import matrix
from tpi.pack.builder.plan import BlockRecipe, PackPlan, RunRecipe
from tpi.pack.builder.quantise import assemble, encode_part
from tpi.pack.builder.writer import read_slabs, read_vector
from tpi.pack.groups import WEIGHTED
from tpi.pack.layout import RunLayout
from tpi.sources.base import Source, find

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
_EXACT: dict[str, Format] = {"F16": "f16", "BF16": "bf16"}  # formats other than f32 that hold a source's values exactly


class FloatReader:
    """Reader of the blocks of a plan from their source: layouts, units and vectors, with all weights as floats."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def layout(self, run: RunRecipe) -> RunLayout:
        """Return the layout of all units of a run: stored vector by vector, in the source's floats or else in f32."""
        parts = tuple(replace(part, format=self._format(run, number)) for number, part in enumerate(run.layout.parts))
        return replace(run.layout, layout="record", parts=parts)

    def units(self, run: RunRecipe, piece: int = 0, first: int = 0, last: int | None = None) -> U8:
        """Read units `[first, last)` of one piece of a run, by default all of them, as 1-D bytes.

        Raises:
            ModelError: if a tensor is missing or of the wrong shape.
        """
        layout = self.layout(run)
        last = run.piece.units if last is None else last
        out = np.empty((last - first, layout.unit_bytes), np.uint8)
        for at, end, slabs in read_slabs(self._source, run.piece, run.pieces[piece], run.vectors, first, last):
            bounds = (at * layout.width, end * layout.width)
            parts = zip(layout.parts, slabs, strict=True)
            encoded = {part.name: encode_part(part, layout, slab.values(*bounds)) for part, slab in parts}
            out[at - first : end - first] = assemble(layout, encoded)
        return out.reshape(-1)

    def rows(self, table: BlockRecipe, numbers: Sequence[int]) -> F32:
        """Read some rows of a table, float32 `[len(numbers), row length]`."""
        (run,) = table.runs
        rows = matrix(self._source, run.pieces[0][0], "row", run.vectors, run.layout.hidden)
        found = {number: rows.load(number, number + 1).values(number, number + 1)[0] for number in set(numbers)}
        return np.stack([found[number] for number in numbers])

    def vectors(self, block: BlockRecipe) -> dict[str, F32]:
        """Read all vectors of a block, float32, by name."""
        return {name: read_vector(self._source, name, ref, length) for name, ref, length in block.vectors}

    def quantised_pieces(self, run: RunRecipe, number: int) -> list[int]:
        """Return the pieces of a run in which the part with this number is quantised by weighted errors.

        The source has floats in these pieces, or codes of another format. A column part in the record layout has no
        such pieces: all values of one of its groups have the same input, so weights would change nothing.
        """
        part = run.layout.parts[number]
        if part.format not in WEIGHTED or (part.axis == "column" and run.layout.layout == "record"):
            return []
        refs = enumerate(pieces[number] for pieces in run.pieces)
        return [piece for piece, ref in refs if find(self._source, ref.tensor).element.nearest != part.format]

    def _format(self, run: RunRecipe, part: int) -> Format:
        names = {find(self._source, refs[part].tensor).element.name for refs in run.pieces}
        return _EXACT.get(names.pop(), "f32") if len(names) == 1 else "f32"


def weighs_errors(plan: PackPlan, source: Source) -> bool:
    """Return True if a matrix of a layer is quantised by weighted errors (`FloatReader.quantised_pieces`)."""
    reader = FloatReader(source)
    runs = (run for layer in plan.layers for block in layer for run in block.runs)
    return any(reader.quantised_pieces(run, number) for run in runs for number in range(len(run.layout.parts)))
