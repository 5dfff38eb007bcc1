"""Copies of arrays to the memory of a device and back, for tests that cannot read that memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tpi.devices.base import Device
from tpi.devices.pages import Bytes


@contextmanager
def held(device: Device, *arrays: Any) -> Iterator[list[Any]]:
    """Yield copies of contiguous arrays in a device's memory, with their dtypes and shapes.

    Free the copies at the end.
    """
    made: list[Bytes] = []
    try:
        for array in arrays:
            made.append(device.memory.allocate(array.nbytes))
            device.copy(array.reshape(-1).view(np.uint8), made[-1]).wait()
        yield [each.view(array.dtype).reshape(array.shape) for each, array in zip(made, arrays, strict=True)]
    finally:
        for each in made:
            device.memory.free(each)


def fetched(device: Device, array: Any) -> Any:
    """Return a copy, in the host's memory, of a contiguous array of a device."""
    found = np.empty(array.nbytes, np.uint8)
    device.copy(array.reshape(-1).view(np.uint8), found).wait()
    return found.view(array.dtype).reshape(array.shape)
