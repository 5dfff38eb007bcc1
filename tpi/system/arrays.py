"""Files of named arrays (numpy's .npz). They are written atomically; damaged ones are refused with their name."""

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
    """Write the arrays given as keyword arguments to the file `path`, each under its name.

    Raises:
        WeightsError: if the file cannot be written.
    """
    buffer = io.BytesIO()
    named: dict[str, Any] = {name: np.asarray(array) for name, array in arrays.items()}
    np.savez(buffer, **named)
    try:
        write_atomically(path, buffer.getvalue())
    except OSError as error:
        raise WeightsError(f"cannot write {path}: {error.strerror}; free disk space, or make it writable") from error


@contextmanager
def read_arrays(path: Path, most_bytes: int, way_out: str) -> Iterator[Mapping[str, Any]]:
    """Yield the arrays that `save_arrays` wrote to `path`, for a `with` block that checks them.

    An exception raised by the block (ValueError, KeyError, TypeError, ...) counts as damage of the file.

    Raises:
        ModelError: naming the file and the `way_out`, if it is missing, larger than `most_bytes`, or damaged.
    """
    from zipfile import BadZipFile  # imported here to save memory in an idle worker

    try:
        if path.stat().st_size > most_bytes:
            raise ValueError(f"it has more than the {most_bytes} bytes allowed")
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            yield file
    except (*_DAMAGED, BadZipFile) as error:
        raise ModelError(f"{path} cannot be used ({str(error)[:100]}); {way_out}") from error
