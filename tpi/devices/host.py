"""The machine that the process runs on: its cores."""

import os
from dataclasses import dataclass

from tpi.kernels import Kernels, open_kernels


@dataclass(frozen=True)
class HostDevice:
    """The host and the kernels that compute on it."""

    kernels: Kernels
    name: str = "host"


def open_host() -> HostDevice:
    """The host with the kernels that the user wants.

    `TPI_KERNELS=reference` computes in numpy, slowly; `TPI_ISA=scalar` forces an instruction set.

    Raises:
        UsageError: if there are no such kernels.
        KernelError: if this machine lacks the instruction set.
    """
    return HostDevice(open_kernels(os.environ.get("TPI_KERNELS") or "native", os.environ.get("TPI_ISA", "")))
