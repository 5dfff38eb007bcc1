"""A disk in emulated time: the disk of the machine that has an emulated accelerator."""

from pathlib import Path

from scheduler.storage.disk import Disk
from tpi.devices.emulated.lane import TimedLink
from tpi.devices.pages import Bytes


class TimedDisk:
    """A disk that reads from another disk in the time of an emulated link, one read after the other.

    Bytes that are requested beyond the end of a file take time too.
    """

    def __init__(self, disk: Disk, link: TimedLink) -> None:
        self.chunk = disk.chunk
        self.threads = disk.threads
        self._disk = disk
        self._link = link

    def read(self, path: Path, offset: int, into: Bytes) -> int:
        """Read `into.size` bytes at `offset` of a file, in the time that the link takes; return the number of bytes."""
        return self._link.move(into.size, lambda: self._disk.read(path, offset, into))
