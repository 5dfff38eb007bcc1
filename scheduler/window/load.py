"""One block's load from disk into its place in memory. `scheduler.window.loader` guards its state with a lock."""

from collections.abc import Callable

from scheduler.storage.disk import Disk, read_chunk, read_extent
from scheduler.storage.extent import Extent
from tpi.devices.pages import Bytes
from tpi.errors import WeightsError

Verify = Callable[[int, Bytes], None]  # gets a block and its bytes; raises WeightsError if the bytes are wrong


def check(verify: Verify, block: int, disk: Disk, extent: Extent, slot: Bytes) -> None:
    """Verify the bytes of `extent` that were read into `slot`; if they are wrong, read and verify them once more.

    Raises:
        WeightsError: if the bytes are wrong again, or cannot be read.
    """
    try:
        verify(block, extent.view(slot))
    except WeightsError:
        verify(block, read_extent(disk, extent, slot))


class Load:
    """One block on its way from disk into its place in memory."""

    def __init__(self, block: int, extent: Extent, slot: Bytes) -> None:
        self.block, self.extent, self.slot = block, extent, slot
        self.view = extent.view(slot)
        self.followed = False  # whether `Loader.follow` takes it in parts
        self.reset()

    def reset(self) -> None:
        """Forget what was read, so that the load can start again."""
        self.cursor = 0  # where the next chunk starts
        self.flying = 0  # chunks being read
        self.front = 0  # offset of the first byte that has not been read: chunks end in any order
        self._landed: dict[int, int] = {}  # start and end of each chunk read beyond `front`
        self.begun = self.ended = 0.0
        self.ready = not self.open  # a node may have no unit of a block
        self.dropped = False
        self.error: WeightsError | None = None

    def landed(self, start: int, size: int) -> None:
        """Note that the chunk of `size` bytes at `start` was read."""
        self._landed[start] = start + size
        while self.front in self._landed:
            self.front = self._landed.pop(self.front)

    @property
    def arrived(self) -> int:
        """Bytes of the view, counted from its first, that have been read without a gap."""
        return min(max(0, self.front - self.extent.skew), self.extent.nbytes)

    def stop(self) -> None:
        """Hand out no more chunks."""
        self.cursor = self.extent.slot_bytes

    @property
    def open(self) -> bool:
        """True if chunks are left to hand out."""
        return self.cursor < self.extent.slot_bytes

    def read_chunk(self, disk: Disk, start: int) -> WeightsError | None:
        """Read the chunk that begins at `start`; return the error if that failed."""
        try:
            read_chunk(disk, self.extent, self.slot, start)
        except WeightsError as error:
            return error
        return None

    def check(self, disk: Disk, verify: Verify) -> WeightsError | None:
        """Verify the block; if it is wrong, read and verify it once more. Return the error if it is still wrong."""
        try:
            check(verify, self.block, disk, self.extent, self.slot)
        except WeightsError as error:
            return error
        return None
