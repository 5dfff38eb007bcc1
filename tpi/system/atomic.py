"""Files that are there as a whole or not at all."""

import os
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to `path`, readable for its owner alone; what was there stays until all is written.

    Raises:
        OSError: if it cannot be written; nothing is left behind then.
    """
    from tempfile import mkstemp  # it loads what waiting for work needs nothing of

    handle, name = mkstemp(prefix=f".{path.name[:32]}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
