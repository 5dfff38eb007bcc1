"""Tables of vocabulary rows that need not be in memory: the master's embedding and head.

Rows are gathered by reading the units that contain them. Logits are computed tile by tile; the tiles of units are the
blocks of a memory window of their own. As many tiles are resident as its budget allows, and the others pass through a
ring. The loader prefetches the next token's tiles while the layers compute. A 128k vocabulary is never in memory as a
whole.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np
import numpy.typing as npt

from scheduler.model.placement import place
from scheduler.model.sizes import TILE
from scheduler.slots.stats import ReadClock
from scheduler.storage.disk import DirectDisk, Disk, read_extent
from scheduler.storage.extent import Extent, tile_starts
from scheduler.window.load import Verify, check
from scheduler.window.stats import SAMPLES, WindowStats
from scheduler.window.window import MemoryWindow
from tpi.devices.pages import PAGE, Bytes, page_buffer
from tpi.errors import KernelError
from tpi.kernels import Kernels
from tpi.pack.layout import RunLayout
from tpi.trace import EMBEDDING, HEAD, OFF, NoTrace

F32 = npt.NDArray[np.float32]
_TILE = f"{HEAD} tile"  # name of a tile in a trace


class RowTable:
    """Rows of a table on disk, a few units in memory at a time: the embedding, and learned positions."""

    def __init__(
        self,
        run: RunLayout,
        extent: Extent,
        kernels: Kernels,
        disk: Disk | None = None,
        trace: NoTrace = OFF,
        verify: Verify | None = None,
    ) -> None:
        """Create a table. `run` is the layout of the whole table, whose units are the bytes of `extent`.

        When a unit is read for the first time, `verify(unit, data)` is called. If it raises WeightsError, the unit is
        read once more.
        """
        self._run, self._extent, self._trace, self._verify = run, extent, trace, verify
        self._kernels = kernels
        self._verified: set[int] = set()  # units that were verified
        self._disk = disk or DirectDisk()
        self._unit = replace(run, units=1)
        self._slot = page_buffer(run.unit_bytes + PAGE)  # a unit may start anywhere in a page
        self._row_waits = deque[float](maxlen=SAMPLES)  # seconds that each step waited
        self._counted = WindowStats()

    def gather(self, rows: Sequence[int]) -> F32:
        """Return the rows `rows`, in that order, `[len(rows), hidden]` float32, with one read for each unit involved.

        Raises:
            WeightsError: if the file cannot be read. The error names it.
            KernelError: if there is no such row.
        """
        wanted = np.asarray(rows, np.int32)
        found = np.empty((len(wanted), self._run.hidden), np.float32)
        units, waited = wanted // self._run.width, 0.0
        for unit in sorted(set(units.tolist())):  # np.unique would import numpy.ma, a few MB
            here = np.flatnonzero(units == unit)
            inside = wanted[here] - np.int32(unit * self._run.width)
            begun = perf_counter()
            with self._trace.span("stall", EMBEDDING):
                data = self.unit(int(unit))
            waited += perf_counter() - begun
            with self._trace.span("compute", EMBEDDING):
                found[here] = self._kernels.gather(self._unit, data, inside)
        self._row_waits.append(waited)
        self._counted += WindowStats(stall_seconds=waited, stalls=len(np.unique(units)))
        return found

    @property
    def waits(self) -> float:
        """Seconds that a step waited for reads: the median of the last steps."""
        return _median(self._row_waits)

    def take(self) -> WindowStats:
        """Return the statistics since the last call, and reset them."""
        found, self._counted = self._counted, WindowStats()
        return found

    def unit(self, index: int) -> Bytes:
        """Return the bytes of one unit, valid until the next read.

        Raises:
            WeightsError: if the file cannot be read. The error names it.
            KernelError: if there is no such unit.
        """
        if not 0 <= index < self._run.units:
            raise KernelError(f"a row is outside 0..{self._run.units * self._run.width - 1}")
        extent = Extent(self._extent.path, self._extent.offset + index * self._run.unit_bytes, self._run.unit_bytes)
        data = read_extent(self._disk, extent, self._slot)
        if self._verify and index not in self._verified:
            check(self._verify, index, self._disk, extent, self._slot)
            self._verified.add(index)
        return data

    def close(self) -> None:
        """Do nothing, as nothing runs in the background."""


class StreamedTable(RowTable):
    """A table of which only `budget` bytes are in memory, with the product that a head needs."""

    def __init__(
        self,
        run: RunLayout,
        extent: Extent,
        budget: int,
        kernels: Kernels,
        disk: Disk | None = None,
        trace: NoTrace = OFF,
        reads: ReadClock | None = None,
        tile: int = TILE,
        verify: Verify | None = None,
    ) -> None:
        """Create a table of tiles with about `tile` bytes, smaller if two of them would not fit into `budget`.

        `reads` is the read clock of the blocks' window, which reads at the same time. The other arguments are those of
        `RowTable`.

        Raises:
            PlanError: if `budget` is too small for one unit.
        """
        super().__init__(run, extent, kernels, disk, trace, verify)
        self._starts = tile_starts(run, min(tile, max(0, budget // 2 - PAGE)))
        bounds = [*self._starts, run.units]
        sizes = [bounds[index + 1] - start for index, start in enumerate(self._starts)]
        self._tiles = [replace(run, units=size) for size in sizes]
        extents = [
            Extent(extent.path, extent.offset + start * run.unit_bytes, size * run.unit_bytes)
            for start, size in zip(self._starts, sizes, strict=True)
        ]
        placement = place([one.slot_bytes for one in extents], budget)
        of_tile = (lambda index, data: verify(self._starts[index], data)) if verify else None
        self._window = MemoryWindow(extents, placement, self._disk, of_tile, trace, _TILE, reads)
        self._tile_waits = deque[float](maxlen=SAMPLES)

    def logits(self, x: F32) -> F32:
        """Return every row times every `x` `[tokens, hidden]`: `[tokens, units * width]` float32.

        Raises:
            WeightsError: if the file cannot be read. The error names it.
        """
        width = self._run.width
        result = np.empty((len(x), self._run.units * width), np.float32)
        for index, ((start, data), tile) in enumerate(zip(self.tiles(), self._tiles, strict=True)):
            with self._trace.span("compute", f"{_TILE} {index}"):
                result[:, start * width : (start + tile.units) * width] = self._kernels.logits(tile, data, x)
        taken = self._window.take()
        self._tile_waits.append(taken.stall_seconds)
        self._counted += taken
        return result

    def tiles(self) -> Iterator[tuple[int, Bytes]]:
        """Yield each tile's first unit and bytes. The bytes are valid until the next tile is requested."""
        for index, start in enumerate(self._starts):
            with self._window.hold(index) as data:
                yield start, data

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that the tiles take."""
        return self._window.placement.memory_bytes

    @property
    def waits(self) -> float:
        """Seconds that a step waited for rows and for tiles: the sum of the two medians over the last steps."""
        return super().waits + _median(self._tile_waits)

    def take(self) -> WindowStats:
        """Return the statistics of rows and tiles since the last call, and reset them."""
        return super().take() + self._window.take()

    def close(self) -> None:
        """Stop the threads that load tiles."""
        self._window.close()


def _median(seconds: Sequence[float]) -> float:
    return float(np.median(seconds)) if seconds else 0.0
