"""The location of a block's bytes on disk."""

from dataclasses import dataclass
from math import gcd
from pathlib import Path

from tpi.devices.pages import PAGE, Bytes, round_up
from tpi.pack.layout import RunLayout


@dataclass(frozen=True)
class Extent:
    """A range of `nbytes` bytes at `offset` in the file `path`: one block of this node, or adjacent units of a block.

    A shard image pads its header to 4 KiB, so that `offset` is a multiple of `PAGE` and the block starts on a page
    boundary. Any other offset works too: the read is rounded outward to whole pages, and the block starts inside the
    first.
    """

    path: Path
    offset: int
    nbytes: int

    @property
    def skew(self) -> int:
        """Bytes from the page boundary where the read starts to the first byte of the block."""
        return self.offset % PAGE

    @property
    def slot_bytes(self) -> int:
        """Bytes of memory that the block occupies: whole pages."""
        return round_up(self.skew + self.nbytes)

    def view(self, slot: Bytes) -> Bytes:
        """Return the block's bytes inside a slot of at least `slot_bytes` into which the extent was read."""
        return slot[self.skew : self.skew + self.nbytes]


def tile_starts(run: RunLayout, size: int) -> list[int]:
    """Return the number of each tile's first unit, if the units of `run` are divided into tiles of `size` bytes.

    A tile is rounded down to whole units, but has at least one. If `size` is large enough, tiles are also rounded down
    so that each starts on a page boundary.
    """
    units = max(1, size // run.unit_bytes)
    even = PAGE // gcd(PAGE, run.unit_bytes)
    if units >= even:
        units -= units % even
    return list(range(0, run.units, units))
