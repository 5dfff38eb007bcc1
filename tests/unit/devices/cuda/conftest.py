"""A CUDA device for the cases: a card if `TPI_TEST_CARD` is set, else torch on the CPU and Triton's interpreter."""

import os
from collections.abc import Iterator
from contextlib import closing

import pytest

from tpi.devices.cuda.device import CudaDevice, open_cuda


def open_tested(limit: int | None = None) -> CudaDevice:
    if os.environ.get("TPI_TEST_CARD"):
        return open_cuda("", limit)
    from tpi.devices.cuda.backend import CpuBackend

    assert os.environ.get("TRITON_INTERPRET") == "1", "without a card these cases need TRITON_INTERPRET=1"
    return CudaDevice(CpuBackend(), limit)


@pytest.fixture(scope="module")
def device() -> Iterator[CudaDevice]:
    """One device for all cases of a module; each gives back what it held."""
    with closing(open_tested()) as opened:
        yield opened
        assert opened.memory.used == 0
