"""A CUDA device for tests: a card if `TPI_TEST_CARD` is set, else torch on the CPU and Triton's interpreter."""

import os

from tests.support.devices.cpu_backend import CpuBackend
from tpi.devices.cuda.device import CudaDevice, open_cuda


def open_tested(limit: int | None = None) -> CudaDevice:
    """Return the device, with an arena of `limit` bytes; the caller closes it."""
    if os.environ.get("TPI_TEST_CARD"):
        return open_cuda("", limit)
    assert os.environ.get("TRITON_INTERPRET") == "1", "without a card these cases need TRITON_INTERPRET=1"
    return CudaDevice(CpuBackend(), limit)
