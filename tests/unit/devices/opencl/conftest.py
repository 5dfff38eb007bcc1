"""One OpenCL device for all tests here: its compiler is slow, and keeps what it has compiled."""

from collections.abc import Iterator

import pytest

from tests.support.devices.opencl_device import opencl_device
from tpi.devices.opencl.device import OpenClDevice


@pytest.fixture(scope="session")
def card() -> Iterator[OpenClDevice]:
    """The device that `opencl` names."""
    with opencl_device() as device:
        yield device
        assert device.memory.used == 0  # every test gave back what it held
