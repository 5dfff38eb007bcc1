"""Files and directories that only their owner can read, whatever the umask. They may contain prompts and weights."""

import os
from pathlib import Path

FILE, FOLDER = 0o600, 0o700


def private(name: str, flags: int) -> int:
    """Open a file as `open(name, mode, opener=private)`. A new file is readable only for its owner.

    Raises:
        OSError: if the file cannot be opened. A FIFO that no process reads from fails at once instead of waiting.
    """
    handle = os.open(name, flags | os.O_CLOEXEC | os.O_NONBLOCK, FILE)
    os.set_blocking(handle, True)
    return handle


def make_private(path: Path) -> None:
    """Create a directory that only its owner can enter, and its missing parents.

    Raises:
        OSError: if the directory cannot be created, or `path` is not a directory.
    """
    for folder in reversed([one for one in (path, *path.parents) if not one.exists()]):
        folder.mkdir(FOLDER, exist_ok=True)
    path.mkdir(FOLDER, exist_ok=True)  # raises if it is a file
