"""The OpenCL device for tests (PoCL makes one of any CPU), and arrays on devices whose memory the host cannot read."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest

from tpi.devices.base import Device
from tpi.devices.opencl.device import OpenClDevice, open_opencl
from tpi.devices.opencl.discover import find_devices
from tpi.devices.pages import Bytes
from tpi.errors import KernelError, UsageError
from tpi.kernels.spec import F32, KvArray, NormSpec


def assert_close(actual: F32, expected: F32, limit: float) -> None:
    """Check that arrays differ by at most `limit` of the largest value."""
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=limit * max(float(np.abs(expected).max()), 1e-3))


@contextmanager
def opencl_device(limit: int | None = None) -> Iterator[OpenClDevice]:
    """Yield the device that `opencl` names, and close it at the end; skip the test if there is none."""
    try:
        there = find_devices()
    except UsageError as error:
        pytest.skip(str(error))
    if not there:
        pytest.skip("no OpenCL platform was found: install pyopencl[pocl], or a graphics driver")
    if refused := compiler_refuses():
        pytest.skip(refused)
    with closing(open_opencl("", limit)) as device:
        yield device


@cache
def compiler_refuses() -> str:
    """Return why the compiler of the device `opencl` refuses programs; empty if it accepts them."""
    with closing(open_opencl("", None)) as device:
        try:
            device.kernels.norm(NormSpec("rms", 1e-6, np.ones(8, np.float32)), np.ones((1, 8), np.float32))
        except KernelError as error:
            return str(error)
    return ""


def hold(device: Device, array: Any) -> Any:
    """Return a copy of an array in a device's memory, of the same dtype and shape."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    held = device.memory.allocate(data.size)
    device.copy(data, held).wait()
    return held.view(array.dtype).reshape(array.shape)


def fetched(device: Device, array: Any) -> Any:
    """Return a copy, in the host's memory, of a contiguous array in a device's memory."""
    data = np.empty(array.nbytes, np.uint8)
    device.copy(array.reshape(-1).view(np.uint8), data).wait()
    return data.view(array.dtype).reshape(array.shape)


@contextmanager
def holding(device: Device, *arrays: Any) -> Iterator[list[Any]]:
    """Yield copies of `arrays` in a device's memory, in their order; free the copies at the end."""
    held = [hold(device, array) for array in arrays]
    try:
        yield held
    finally:
        for array in held:
            device.memory.free(as_bytes(array))


def as_bytes(array: KvArray) -> Bytes:
    """Return the bytes of a contiguous array, as a 1-D array."""
    return array.reshape(-1).view(np.uint8)
