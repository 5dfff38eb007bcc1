"""The machine that the process runs on, as a device: its cores and its memory."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from tpi.devices.arena import Arena
from tpi.devices.base import Event, Finished, Pending
from tpi.devices.pages import Bytes, page_buffer
from tpi.errors import DeviceError
from tpi.kernels import Kernels, open_kernels

T = TypeVar("T")
NAME = "host"


@dataclass(frozen=True)
class HostDevice:
    """The host as a device (`tpi.devices.base.Device`): every call is made at once, in the calling thread."""

    kernels: Kernels
    memory: Arena = field(default_factory=lambda: Arena(NAME))
    name: str = NAME

    def copy(self, source: Bytes, target: Bytes) -> Event:
        """Copy in the calling thread, and return an event that has ended."""
        check_sizes(source, target)
        return Finished(lambda: np.copyto(target, source))

    def start(self, call: Callable[[], T]) -> Pending[T]:
        """Make the call at once, in the calling thread; return it as an operation that has ended."""
        return Finished(call)

    def staging(self, size: int) -> Bytes:
        """Return `size` zeroed bytes of host memory that this device copies from and to at full speed."""
        return page_buffer(size)

    def close(self) -> None:
        """Do nothing: the host has no threads of its own."""


def check_sizes(source: Bytes, target: Bytes) -> None:
    """Raise DeviceError unless both are 1-D uint8 arrays of one size."""
    if source.shape != target.shape or source.ndim != 1 or not source.dtype == target.dtype == np.uint8:
        raise DeviceError(f"a copy needs two 1-D uint8 arrays of one size, not {source.shape} and {target.shape}")


def open_host(limit: int | None = None) -> HostDevice:
    """Return the host with the kernels that the user chose, and at most `limit` bytes of memory in its arena.

    `TPI_KERNELS=reference` computes in numpy, slowly; `TPI_ISA=scalar` forces an instruction set.

    Raises:
        UsageError: if there are no such kernels.
        KernelError: if this machine lacks the instruction set.
    """
    kernels = open_kernels(os.environ.get("TPI_KERNELS") or "native", os.environ.get("TPI_ISA", ""))
    return HostDevice(kernels, Arena(NAME, limit))
