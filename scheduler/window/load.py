"""One block on its way from disk into its place in memory. `scheduler.window.loader` guards its state with a lock."""

from collections.abc import Callable

from scheduler.storage.disk import Disk, read_chunk, read_extent
from scheduler.storage.extent import Extent
from tpi.devices.pages import Bytes
from tpi.errors import WeightsError

Verify = Callable[[int, Bytes], None]  # block, its bytes; raises WeightsError if they are not what they should be


def check(verify: Verify, block: int, disk: Disk, extent: Extent, slot: Bytes) -> None:
    """Verify what was read of `extent` into `slot`; read it once more if it is not what it should be.

    Raises:
        WeightsError: if it is not then either, or cannot be read.
    """
    try:
        verify(block, extent.view(slot))
    except WeightsError:
        verify(block, read_extent(disk, extent, slot))


class Load:
    """One block on its way into its place in memory."""

    def __init__(self, block: int, extent: Extent, slot: Bytes) -> None:
        self.block, self.extent, self.slot = block, extent, slot
        self.view = extent.view(slot)
        self.followed = False  # somebody takes it part after part
        self.reset()

    def reset(self) -> None:
        """Nothing read yet."""
        self.cursor = 0  # where the next chunk starts
        self.flying = 0  # chunks being read
        self.front = 0  # where the first byte is that has not been read: chunks end in any order
        self._landed: dict[int, int] = {}  # begin and end of chunks beyond it
        self.begun = self.ended = 0.0
        self.ready = not self.open  # a node may have nothing of a block
        self.dropped = False
        self.error: WeightsError | None = None

    def landed(self, start: int, size: int) -> None:
        """The chunk of `size` bytes that begins at `start` was read."""
        self._landed[start] = start + size
        while self.front in self._landed:
            self.front = self._landed.pop(self.front)

    @property
    def arrived(self) -> int:
        """Bytes of the view, from its first on, that have been read."""
        return min(max(0, self.front - self.extent.skew), self.extent.nbytes)

    def stop(self) -> None:
        """Hand out no more chunks."""
        self.cursor = self.extent.slot_bytes

    @property
    def open(self) -> bool:
        """Whether chunks are left to hand out."""
        return self.cursor < self.extent.slot_bytes

    def read_chunk(self, disk: Disk, start: int) -> WeightsError | None:
        """Read the chunk that begins at `start`; returns what went wrong."""
        try:
            read_chunk(disk, self.extent, self.slot, start)
        except WeightsError as error:
            return error
        return None

    def check(self, disk: Disk, verify: Verify) -> WeightsError | None:
        """Verify the block; read it once more if it is not what it should be. Returns what is wrong then."""
        try:
            check(verify, self.block, disk, self.extent, self.slot)
        except WeightsError as error:
            return error
        return None
