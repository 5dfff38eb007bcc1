"""A disk in emulated time: the one of the machine that an emulated accelerator stands in."""

from pathlib import Path

from scheduler.storage.disk import Disk
from tpi.devices.emulated.lane import TimedLink
from tpi.devices.pages import Bytes


class TimedDisk:
    """Another disk, whose reads go along `link` one after the other. See `scheduler.storage.disk.Disk`.

    The bytes asked for are what takes time, as `ThrottledDisk` counts them.
    """

    def __init__(self, disk: Disk, link: TimedLink) -> None:
        self.chunk = disk.chunk
        self.threads = disk.threads
        self._disk = disk
        self._link = link

    def read(self, path: Path, offset: int, into: Bytes) -> int:
        """See `Disk.read`."""
        return self._link.move(into.size, lambda: self._disk.read(path, offset, into))
