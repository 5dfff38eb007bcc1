"""The functions of torch that a CUDA device uses, behind the protocol `TorchBackend`."""

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch

Tensor = Any  # torch is not typed here
_DRIVER = Path("/proc/driver/nvidia/version")
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every card
WORKSPACE = 256 << 20  # bytes of a card that are left to activations and to CUDA itself


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run `grid` programs of a Triton kernel in the current stream; do nothing if a dimension is 0."""
    if 0 not in grid:
        kernel[grid](*arguments, enable_fp_fusion=True, **constants)


def power(count: int) -> int:
    """Return the smallest power of two that is at least `count` and at least 1."""
    return 1 << max(0, count - 1).bit_length()


class TorchEvent(Protocol):
    """A point in a stream (a CUDA event)."""

    @property
    def done(self) -> bool:
        """True if all work that was queued before the event has been done."""
        ...

    def wait(self) -> None:
        """Wait for the work that was queued before the event; raise RuntimeError if the card failed."""
        ...


class TorchStream(Protocol):
    """A queue of work that runs in order, and in parallel to other streams (a CUDA stream)."""

    def use(self) -> AbstractContextManager[None]:
        """Return a context manager within which torch and Triton queue this thread's work in this stream."""
        ...

    def mark(self) -> TorchEvent:
        """Return an event that ends when all work queued so far has ended."""
        ...


class RecordingStream(TorchStream, Protocol):
    """A queue of work that can also record work to repeat it."""

    def record(self, call: Callable[[], object]) -> Callable[[], object]:
        """Return a function that queues the work of `call` again, with the same tensors; do not do the work now.

        Call it within `use`. `call` must have been called before, so that its programs are compiled.
        """
        ...


class TorchBackend(Protocol):
    """The memory and the streams of one torch device."""

    @property
    def name(self) -> str:
        """The device's name in messages."""
        ...

    @property
    def identity(self) -> str:
        """Model, UUID or bus address, and driver version: everything that the device's speed depends on."""
        ...

    @property
    def shares_memory(self) -> bool:
        """True if the device's memory is the host's."""
        ...

    @property
    def device(self) -> Any:
        """The `torch.device` on which tensors are created."""
        ...

    def lane(self) -> RecordingStream:
        """Return a new stream of the device."""
        ...

    def zeros(self, size: int) -> Tensor:
        """Return `size` zeroed bytes of the device, 1-D uint8; raise MemoryError if it has too few left."""
        ...

    def pin(self, address: int, size: int) -> Callable[[], object] | None:
        """Pin whole pages of host memory in place, so that the device reads and writes them at full speed.

        Returns:
            The function that unpins them, or None if the driver refuses.
        """
        ...


class CudaBackend:
    """A CUDA card (`TorchBackend`)."""

    def __init__(self, index: int) -> None:
        self.name = f"cuda:{index}"
        self.device = torch.device("cuda", index)

    @cached_property
    def identity(self) -> str:
        """Model, UUID or bus address, and versions of the driver and of the compilers."""
        known = torch.cuda.get_device_properties(self.device)
        place = (getattr(known, name, None) for name in ("uuid", "pci_domain_id", "pci_bus_id", "pci_device_id"))
        where = " ".join(str(each) for each in place if each is not None)
        compilers = f"CUDA {torch.version.cuda}, torch {torch.__version__}, Triton {version('triton')}"
        return f"{known.name}, {where or self.name}, {known.total_memory} bytes, driver {_driver()}, {compilers}"

    @cached_property
    def shares_memory(self) -> bool:
        """True if the card's memory is the host's, as on Jetson boards."""
        return bool(getattr(torch.cuda.get_device_properties(self.device), "is_integrated", False))

    def lane(self) -> RecordingStream:
        """Return a new stream of the card."""
        return CudaLane(torch.cuda.Stream(self.device))

    def zeros(self, size: int) -> Tensor:
        """Return `size` zeroed bytes of the card, 1-D uint8; raise MemoryError if it has too few left."""
        try:
            made = torch.zeros(size, dtype=torch.uint8, device=self.device)
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryError from error
        torch.cuda.current_stream(self.device).synchronize()
        return made

    def pin(self, address: int, size: int) -> Callable[[], object] | None:
        """Pin host memory for every card; return the function that unpins it, or None if the driver refuses."""
        runtime = torch.cuda.cudart()
        if int(runtime.cudaHostRegister(address, size, _PORTABLE)) == 0:
            return partial(runtime.cudaHostUnregister, address)
        with suppress(RuntimeError):  # CUDA reports the error again at the next launch: let that be this one
            torch.ones(1, device=self.device).add_(1)
        return None

    def room(self) -> int:
        """Return the bytes of memory that an arena may use: the free memory less `WORKSPACE`."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return max(0, int(free) - WORKSPACE)


def _driver() -> str:
    """Return the driver's version from its file in /proc; "unknown" if that cannot be read."""
    with suppress(OSError):
        return " ".join(_DRIVER.read_text().split()[:16])
    return "unknown"


class CudaLane:
    """A stream of a card (`TorchStream`)."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._pool: Any = None  # memory of the recorded launches

    def use(self) -> AbstractContextManager[None]:
        """Return a context manager within which torch and Triton queue this thread's work in the stream."""
        within: AbstractContextManager[None] = torch.cuda.stream(self._stream)
        return within

    def mark(self) -> TorchEvent:
        """Record an event on the stream and return it; it completes after all work that is queued so far."""
        event = torch.cuda.Event(blocking=True)  # the waiting thread sleeps, so that the host's cores can compute
        event.record(self._stream)
        return CudaEvent(event)

    def record(self, call: Callable[[], object]) -> Callable[[], object]:
        """Record the launches of `call` as a CUDA graph; return the function that queues the graph in the stream.

        All graphs of a stream share the memory of their temporary values, because one runs at a time.
        """
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # other threads may copy meanwhile
        try:
            call()
        finally:
            graph.capture_end()
        replay: Callable[[], object] = graph.replay
        return replay


class CudaEvent:
    """An event of a card (`TorchEvent`)."""

    def __init__(self, event: Any) -> None:
        self._event = event

    @property
    def done(self) -> bool:
        """True if all work before the event has been done."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Wait for the work that was queued before the event; raise RuntimeError if the card failed."""
        self._event.synchronize()
