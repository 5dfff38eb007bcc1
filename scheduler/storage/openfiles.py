"""A disk that keeps files open, for reads so small that opening a file takes as long as reading."""

import os
from pathlib import Path
from threading import Lock

from scheduler.storage.disk import DirectDisk
from tpi.devices.pages import PAGE, Bytes

_DIRECT = getattr(os, "O_DIRECT", 0)


class OpenFilesDisk:
    """A `scheduler.storage.disk.Disk` that reads as the given `DirectDisk` does, and keeps files open until `close`.

    If a file is replaced while it is open, reads still return the old contents.
    """

    def __init__(self, disk: DirectDisk) -> None:
        self.chunk, self.threads = disk.chunk, disk.threads
        self._disk = disk
        self._files: dict[Path, int] = {}
        self._lock = Lock()

    def read(self, path: Path, offset: int, into: Bytes) -> int:
        """Read `into.size` bytes at `offset` of a file, opened if it is not open yet; return the number of bytes."""
        if not self._disk.direct or not hasattr(os, "preadv"):
            return self._disk.read(path, offset, into)
        done = 0
        try:
            file = self._file(path)
            while done < into.size:
                got = os.preadv(file, [into[done:].data], offset + done)
                done += got
                if not got or done % PAGE:  # a direct read ends inside a page only at the end of the file
                    break
        except OSError:
            return self._disk.read(path, offset, into)  # it can fall back to a read through the kernel's buffers
        return done

    def close(self) -> None:
        """Close all files; no read may be in progress. Further calls do nothing."""
        with self._lock:
            files, self._files = self._files, {}
        for file in files.values():
            os.close(file)

    def _file(self, path: Path) -> int:
        with self._lock:
            if path not in self._files:
                self._files[path] = os.open(path, os.O_RDONLY | _DIRECT | getattr(os, "O_CLOEXEC", 0))
            return self._files[path]
