"""Writing of files that appear as a whole or not at all."""

import os
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to `path`, readable only for its owner. An existing file is replaced once all is written.

    Raises:
        OSError: if the file cannot be written. No partial file is left behind.
    """
    from tempfile import mkstemp  # imported here to save memory in an idle worker

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
