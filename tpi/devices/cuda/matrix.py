"""The description of one part of a run for the kernels: format, layout, and the place of its bytes."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tpi.config import Format
from tpi.pack.groups import CODE_BYTES
from tpi.pack.layout import GROUP, GROUP_BYTES, TILE_OUTPUTS, RunLayout, is_quantised


@dataclass(frozen=True)
class PackedMatrix:
    """Packed weights of `vectors` vectors of `length` values.

    Attributes:
        column: True if each vector is a column and belongs to one input; False for rows, which belong to one output.
        offset, unit, tall, deep: place of the bytes, see `tpi.devices.cuda.programs.weights`.
    """

    format: Format
    tiled: bool
    column: bool
    vectors: int
    length: int
    offset: int
    unit: int
    tall: int
    deep: int

    @property
    def grouped(self) -> bool:
        """True if groups of weights run along the inputs, so that products use rounded inputs group by group."""
        return is_quantised(self.format) and (self.tiled or not self.column)

    @property
    def outputs(self) -> int:
        """Number of output values of a product with the matrix."""
        return self.length if self.column else self.vectors

    @property
    def inputs(self) -> int:
        """Number of input values of a product with the matrix."""
        return self.vectors if self.column else self.length

    @property
    def constants(self) -> Mapping[str, Any]:
        """Compile-time constants of the format for kernels; floats have no groups."""
        if not is_quantised(self.format):
            return {"FORMAT": self.format, "BYTES": 0, "CODES": 1}
        return {"FORMAT": self.format, "BYTES": GROUP_BYTES[self.format], "CODES": CODE_BYTES[self.format]}


@lru_cache(maxsize=256)
def matrix(run: RunLayout, name: str) -> PackedMatrix:
    """Return the part of `run` called `name`."""
    part, tiled = run.part(name), run.layout == "tiled"
    column = part.axis == "column"
    high, wide = (run.hidden, run.width) if column else (run.width, run.hidden)
    return PackedMatrix(
        format=part.format,
        tiled=tiled,
        column=column,
        vectors=run.units * run.width,
        length=run.hidden,
        offset=run.part_offset(name),
        unit=run.unit_bytes if tiled else run.record_bytes,
        tall=max(1, high // TILE_OUTPUTS) if tiled else 1,
        deep=max(1, wide // GROUP) if tiled else 1,
    )
