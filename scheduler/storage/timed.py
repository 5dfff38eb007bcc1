"""A disk in emulated time: the disk of the machine that has an emulated accelerator."""

from pathlib import Path

from scheduler.storage.disk import Disk
from tpi.devices.emulated.lane import TimedLink
from tpi.devices.pages import Bytes


class TimedDisk:
    """Another disk whose reads pass through an emulated link, one after the other.

    The requested bytes take time, even beyond the end of a file.
    """

    def __init__(self, disk: Disk, link: TimedLink) -> None:
        self.chunk = disk.chunk
        self.threads = disk.threads
        self._disk = disk
        self._link = link

    def read(self, path: Path, offset: int, into: Bytes) -> int:
        """Read from the other disk in the time that the link takes."""
        return self._link.move(into.size, lambda: self._disk.read(path, offset, into))
