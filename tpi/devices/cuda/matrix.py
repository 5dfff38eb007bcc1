"""One part of a run as the kernels are told of it: format, layout, and where its bytes are."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tpi.config import Format
from tpi.pack.groups import CODE_BYTES
from tpi.pack.layout import GROUP, GROUP_BYTES, TILE_OUTPUTS, RunLayout, is_quantised


@dataclass(frozen=True)
class PackedMatrix:
    """Packed weights of `vectors` vectors of `length` values. See `tpi.devices.cuda.programs.weights` for the strides.

    Attributes:
        column: whether the vectors are columns: each belongs to one input, not to one output.
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
        """Whether it is multiplied group by group with rounded inputs: its groups run along them."""
        return is_quantised(self.format) and (self.tiled or not self.column)

    @property
    def outputs(self) -> int:
        """Values that a product has."""
        return self.length if self.column else self.vectors

    @property
    def inputs(self) -> int:
        """Values that are multiplied."""
        return self.vectors if self.column else self.length

    @property
    def constants(self) -> Mapping[str, Any]:
        """What kernels know of the format when they are compiled; floats have no groups."""
        if not is_quantised(self.format):
            return {"FORMAT": self.format, "BYTES": 0, "CODES": 1}
        return {"FORMAT": self.format, "BYTES": GROUP_BYTES[self.format], "CODES": CODE_BYTES[self.format]}


@lru_cache(maxsize=256)
def matrix(run: RunLayout, name: str) -> PackedMatrix:
    """The part of `run` called `name`."""
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
