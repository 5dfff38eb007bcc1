"""Files of named arrays (numpy's .npz): written as a whole or not at all, refused by name where they are damaged."""

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tpi.errors import ModelError, WeightsError
from tpi.system.atomic import write_atomically

_DAMAGED = (OSError, KeyError, TypeError, ValueError, EOFError, RuntimeError)


def save_arrays(path: Path, **arrays: npt.ArrayLike) -> None:
    """Write arrays by their names.

    Raises:
        WeightsError: if they cannot be written.
    """
    buffer = io.BytesIO()
    named: dict[str, Any] = {name: np.asarray(array) for name, array in arrays.items()}
    np.savez(buffer, **named)
    try:
        write_atomically(path, buffer.getvalue())
    except OSError as error:
        raise WeightsError(f"cannot write {path}: {error.strerror}; free some disk, or make it writable") from error


@contextmanager
def read_arrays(path: Path, most_bytes: int, way_out: str) -> Iterator[Mapping[str, Any]]:
    """What `save_arrays` wrote, for a block that checks it: whatever that raises as ValueError and the like is damage.

    Raises:
        ModelError: naming the file and the `way_out`, if it is missing, larger than `most_bytes`, or damaged.
    """
    from zipfile import BadZipFile  # a worker that waits needs no zip files

    try:
        if path.stat().st_size > most_bytes:
            raise ValueError("too large")
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            yield file
    except (*_DAMAGED, BadZipFile) as error:
        raise ModelError(f"{path} cannot be used ({str(error)[:100]}); {way_out}") from error
