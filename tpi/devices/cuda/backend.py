"""What a CUDA device needs of torch, so little that torch on the CPU has it too: there it is tested without a card."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from threading import RLock
from typing import Any, Protocol

import torch

Tensor = Any  # torch is not typed here
_DRIVER = Path("/proc/driver/nvidia/version")
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every card
WORKSPACE = 256 << 20  # bytes of a card that are left to activations, and to CUDA itself


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run `grid` programs of a Triton kernel in the lane that is in use; none where it is empty."""
    if 0 not in grid:
        kernel[grid](*arguments, enable_fp_fusion=True, **constants)


def power(count: int) -> int:
    """The smallest power of two that is at least `count`, or 1."""
    return 1 << max(0, count - 1).bit_length()


class TorchMark(Protocol):
    """A point in a lane."""

    @property
    def done(self) -> bool:
        """Whether all before it has been done."""
        ...

    def wait(self) -> None:
        """Return when it has; RuntimeError if the card failed."""
        ...


class TorchLane(Protocol):
    """Where one thing is done after the other, beside other lanes: a stream."""

    def use(self) -> AbstractContextManager[None]:
        """What this thread tells torch and Triton within it is done in this lane."""
        ...

    def mark(self) -> TorchMark:
        """The point behind all that the lane has been told."""
        ...


class TorchBackend(Protocol):
    """Memory and lanes of one device of torch."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    @property
    def identity(self) -> str:
        """See `tpi.devices.base.Identified`."""
        ...

    @property
    def shares_memory(self) -> bool:
        """See `tpi.devices.base.Sharing`."""
        ...

    @property
    def device(self) -> Any:
        """The `torch.device` on which tensors are made."""
        ...

    def lane(self) -> TorchLane:
        """A new lane."""
        ...

    def zeros(self, size: int) -> Tensor:
        """`size` bytes of the device, 1-D uint8, zeroed by now. MemoryError if it has no more."""
        ...

    def pin(self, address: int, size: int) -> Callable[[], object] | None:
        """Have the device read and write whole pages of the host at full speed, where they are.

        Returns what ends that; None if the driver refuses.
        """
        ...


class CudaBackend:
    """A card. See `TorchBackend`."""

    def __init__(self, index: int) -> None:
        self.name = f"cuda:{index}"
        self.device = torch.device("cuda", index)

    @cached_property
    def identity(self) -> str:
        """See `tpi.devices.base.Identified`; the driver's version, and those of what compiles its programs."""
        known = torch.cuda.get_device_properties(self.device)
        place = (getattr(known, name, None) for name in ("uuid", "pci_domain_id", "pci_bus_id", "pci_device_id"))
        where = " ".join(str(each) for each in place if each is not None)
        compilers = f"CUDA {torch.version.cuda}, torch {torch.__version__}, Triton {version('triton')}"
        return f"{known.name}, {where or self.name}, {known.total_memory} bytes, driver {_driver()}, {compilers}"

    @cached_property
    def shares_memory(self) -> bool:
        """See `tpi.devices.base.Sharing`: so do Jetson's boards."""
        return bool(getattr(torch.cuda.get_device_properties(self.device), "is_integrated", False))

    def lane(self) -> TorchLane:
        """See `TorchBackend.lane`."""
        return CudaLane(torch.cuda.Stream(self.device))

    def zeros(self, size: int) -> Tensor:
        """See `TorchBackend.zeros`."""
        try:
            made = torch.zeros(size, dtype=torch.uint8, device=self.device)
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryError from error
        torch.cuda.current_stream(self.device).synchronize()
        return made

    def pin(self, address: int, size: int) -> Callable[[], object] | None:
        """See `TorchBackend.pin`."""
        runtime = torch.cuda.cudart()
        if int(runtime.cudaHostRegister(address, size, _PORTABLE)) == 0:
            return partial(runtime.cudaHostUnregister, address)
        with suppress(RuntimeError):  # CUDA has kept the error for the next launch to report: this one
            torch.ones(1, device=self.device).add_(1)
        return None

    def room(self) -> int:
        """Bytes that an arena may have: what is free now, without `WORKSPACE`."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return max(0, int(free) - WORKSPACE)


def _driver() -> str:
    """The driver's version, as its file says."""
    with suppress(OSError):
        return " ".join(_DRIVER.read_text().split()[:16])
    return "unknown"


class CudaLane:
    """A stream of a card. See `TorchLane`."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def use(self) -> AbstractContextManager[None]:
        """See `TorchLane.use`."""
        within: AbstractContextManager[None] = torch.cuda.stream(self._stream)
        return within

    def mark(self) -> TorchMark:
        """See `TorchLane.mark`."""
        event = torch.cuda.Event(blocking=True)  # the host's cores compute meanwhile
        event.record(self._stream)
        return CudaMark(event)


class CudaMark:
    """An event of a card. See `TorchMark`."""

    def __init__(self, event: Any) -> None:
        self._event = event

    @property
    def done(self) -> bool:
        """See `TorchMark.done`."""
        return bool(self._event.query())

    def wait(self) -> None:
        """See `TorchMark.wait`."""
        self._event.synchronize()


class CpuBackend:
    """Torch on the CPU: everything is done at once. Kernels need Triton's interpreter (`TRITON_INTERPRET=1`)."""

    name = identity = "cuda (emulated)"
    shares_memory = False
    device = torch.device("cpu")

    def lane(self) -> TorchLane:
        """See `TorchBackend.lane`."""
        return CpuLane()

    def zeros(self, size: int) -> Tensor:
        """See `TorchBackend.zeros`."""
        return torch.zeros(size, dtype=torch.uint8)

    def pin(self, address: int, size: int) -> Callable[[], object] | None:
        """See `TorchBackend.pin`; all memory is the device's."""
        return nothing


def nothing() -> None:
    """Do nothing."""


class CpuLane:
    """What is told it is done at once, by one thread at a time: Triton's interpreter has one state for all."""

    done = True
    _turn = RLock()

    @contextmanager
    def use(self) -> Iterator[None]:
        """See `TorchLane.use`."""
        with self._turn:
            yield

    def mark(self) -> TorchMark:
        """See `TorchLane.mark`."""
        return self

    def wait(self) -> None:
        """See `TorchMark.wait`."""
