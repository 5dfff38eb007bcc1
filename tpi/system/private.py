"""Files and directories that only their owner can read, whatever the umask: they tell of prompts, weights and homes."""

import os
from pathlib import Path

FILE, FOLDER = 0o600, 0o700


def private(name: str, flags: int) -> int:
    """Open a file as `open(name, mode, opener=private)`: one that is made is readable for its owner alone.

    Raises:
        OSError: if it cannot be opened, also at once where `name` is a FIFO that no process reads from.
    """
    handle = os.open(name, flags | os.O_CLOEXEC | os.O_NONBLOCK, FILE)
    os.set_blocking(handle, True)
    return handle


def make_private(path: Path) -> None:
    """Make a directory that only its owner can enter, and those above it that are missing.

    Raises:
        OSError: if it cannot be made, or is not a directory.
    """
    for folder in reversed([one for one in (path, *path.parents) if not one.exists()]):
        folder.mkdir(FOLDER, exist_ok=True)
    path.mkdir(FOLDER, exist_ok=True)  # raises if it is a file
