"""Where the bytes of one block are on disk."""

from dataclasses import dataclass
from math import gcd
from pathlib import Path

from tpi.devices.pages import PAGE, Bytes, round_up
from tpi.pack.layout import RunLayout


@dataclass(frozen=True)
class Extent:
    """`nbytes` bytes of the file `path` from `offset` on: one block of this node, or any run of units.

    A shard image pads its header to 4 KiB, so that `offset` is a multiple of `PAGE` and the block's first byte lands on
    a page boundary. Any other offset works too: the read is rounded outward and the block starts inside its first page.
    """

    path: Path
    offset: int
    nbytes: int

    @property
    def skew(self) -> int:
        """Bytes between the page boundary where the read starts and the first byte of the block."""
        return self.offset % PAGE

    @property
    def slot_bytes(self) -> int:
        """Bytes of memory that the block occupies: whole pages."""
        return round_up(self.skew + self.nbytes)

    def view(self, slot: Bytes) -> Bytes:
        """The block's bytes inside a slot of at least `slot_bytes` into which the extent was read."""
        return slot[self.skew : self.skew + self.nbytes]


def tile_starts(run: RunLayout, size: int) -> list[int]:
    """First unit of each tile of about `size` bytes, at least one unit; on page boundaries where `size` allows."""
    units = max(1, size // run.unit_bytes)
    even = PAGE // gcd(PAGE, run.unit_bytes)
    if units >= even:
        units -= units % even
    return list(range(0, run.units, units))
