"""Kernels from OpenCL C sources: each program is built once for a device, with its constants as definitions."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpi.devices.opencl.discover import opencl
from tpi.errors import KernelError

_SOURCES = Path(__file__).parent / "sources"
_OPTIONS = ["-cl-mad-enable"]
_EXACT = "-cl-fp32-correctly-rounded-divide-sqrt"  # else a scale may be the neighbour of the reference's
# PoCL asks clang for the CPU "generic" if its LLVM does not know the processor, and clang refuses it (pocl/pocl#1049)
_NO_SUCH_CPU = "unknown target CPU 'generic'"
_NEWER = "install a newer one (Debian and Ubuntu: apt install pocl-opencl-icd), or leave --device opencl out"


@dataclass(frozen=True)
class Program:
    """A program to build: its source files, without their ending, and its definitions (`NAME` or `NAME=VALUE`)."""

    sources: tuple[str, ...]
    defined: tuple[str, ...] = ()


class Programs:
    """The compiled kernels of one device. Only one thread at a time may use it."""

    def __init__(self, context: Any) -> None:
        self._context = context
        exact = opencl().device_fp_config.CORRECTLY_ROUNDED_DIVIDE_SQRT
        able = all(device.single_fp_config & exact for device in context.devices)
        self._options = [*_OPTIONS, _EXACT] if able else _OPTIONS
        self._built: dict[Program, Any] = {}
        self._kernels: dict[tuple[Program, str], Any] = {}

    def kernel(self, program: Program, name: str) -> Any:
        """Return the `pyopencl.Kernel` called `name`.

        Raises:
            KernelError: if the device's compiler refuses the program.
        """
        key = program, name
        if key not in self._kernels:
            self._kernels[key] = opencl().Kernel(self._build(program), name)
        return self._kernels[key]

    def _build(self, program: Program) -> Any:
        if program not in self._built:
            cl = opencl()
            text = "\n".join((_SOURCES / f"{name}.cl").read_text() for name in ("common", *program.sources))
            options = [*self._options, *(f"-D{each}" for each in program.defined)]
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # compilers may warn about a program that they accept
                    self._built[program] = cl.Program(self._context, text).build(options)
            except cl.Error as error:
                raise KernelError(_refusal(program, str(error))) from error
        return self._built[program]


def _refusal(program: Program, log: str) -> str:
    if _NO_SUCH_CPU in log:
        return f"this OpenCL driver is older than the machine's processor ({_NO_SUCH_CPU}); {_NEWER}"
    return f"the OpenCL compiler refuses {program}: {' '.join(log.split())}"
