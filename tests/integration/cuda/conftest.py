"""One CUDA device for the cases of a module."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.support.devices.cuda_device import open_tested
from tpi.devices.cuda.device import CudaDevice


@pytest.fixture(scope="module")
def device() -> Iterator[CudaDevice]:
    """Each case gives back what it held."""
    with closing(open_tested()) as opened:
        yield opened
        assert opened.memory.used == 0
