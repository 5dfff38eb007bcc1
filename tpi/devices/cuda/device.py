"""A CUDA card as a device of a node, and the function that opens it. Experimental."""

from collections.abc import Callable
from importlib.util import find_spec
from threading import Lock
from typing import TypeVar
from weakref import finalize

import numpy as np
import torch

from tpi.devices.arena import Arena
from tpi.devices.base import Event, Pending
from tpi.devices.callqueue import CallQueue
from tpi.devices.cuda.backend import CudaBackend, Tensor, TorchBackend
from tpi.devices.cuda.copies import CudaCopies
from tpi.devices.cuda.tensors import TensorTable, bytes_at
from tpi.devices.failures import close_all
from tpi.devices.host import check_sizes
from tpi.devices.pages import Bytes, page_buffer
from tpi.errors import DeviceError, UsageError
from tpi.kernels import Kernels
from tpi.progress import warn

T = TypeVar("T")
OLDEST = (7, 5)  # compute capability of the oldest cards (Turing) for which tests compile every program


class _Owner:
    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        self.__array_interface__ = memory.__array_interface__


class Staging:
    """The pinned memory of one card. Several threads may use it at once."""

    def __init__(self, backend: TorchBackend) -> None:
        self._backend = backend
        self._lock = Lock()
        self._pins: list[finalize[..., _Owner]] = []
        self._refused = False

    def allocate(self, size: int) -> Bytes:
        """Return `round_up(size)` zeroed, page-aligned bytes, pinned until no array refers to them.

        If the driver refuses to pin them, they are ordinary memory, and the first refusal is reported.
        """
        memory = page_buffer(size)
        if not memory.size:
            return memory
        unpin = self._pinned(memory)
        if unpin is None:
            return memory
        owner = _Owner(memory)
        with self._lock:
            self._pins = [pin for pin in self._pins if pin.alive]
            self._pins.append(finalize(owner, unpin))
            self._pins[-1].atexit = False  # the driver ends with the process
        found: Bytes = np.asarray(owner)
        return found

    def close(self) -> None:
        """Unpin all memory, which then is ordinary memory. No copy may be running. Further calls do nothing."""
        with self._lock:
            pins, self._pins = self._pins, []
        for pin in pins:
            pin()

    def _pinned(self, memory: Bytes) -> Callable[[], object] | None:
        try:
            unpin = self._backend.pin(memory.ctypes.data, memory.size)
        except Exception:  # noqa: BLE001 - copies work without pinning; a failed card raises when they are awaited
            unpin = None
        if unpin is None and not self._refused:
            self._refused = True
            name, size = self._backend.name, memory.size >> 20
            warn(f"{name}: the driver cannot pin {size}MiB of memory, so copies are slower")
        return unpin


class CudaDevice:
    """Memory, copies and kernels of one card (`tpi.devices.base.Device`).

    A call ends when its result is in host memory. Copies have a stream for each direction. They overlap with computing
    if the host's array is from `staging`.
    """

    def __init__(self, backend: TorchBackend, limit: int | None = None) -> None:
        """Create the device; `limit` bytes are for the arena only, not for the kernels' temporary values."""
        from tpi.devices.cuda.kernels import CudaKernels  # imports Triton

        self.name = backend.name
        self._backend = backend
        self._names = TensorTable(backend)
        self.memory = Arena(self.name, limit, self._names.allocate, self._names.release)
        self._computing = CudaKernels(backend, self.memory, self._names)
        self.kernels: Kernels = self._computing
        self._staging = Staging(backend)
        self._calls = CallQueue(f"{self.name} compute")
        self._inward, self._outward = (CudaCopies(self.name, backend.lane()) for _ in range(2))

    @property
    def identity(self) -> str:
        """Model, UUID or bus address, and driver version: everything that the device's speed depends on."""
        return self._backend.identity

    @property
    def shares_memory(self) -> bool:
        """True if the device's memory is the host's."""
        return self._backend.shares_memory

    def copy(self, source: Bytes, target: Bytes) -> Event:
        """Start copying contiguous bytes between host and device memory, or within the device's."""
        check_sizes(source, target)
        inward, outward = self.memory.owns(target), self.memory.owns(source)
        if not (inward or outward):
            raise DeviceError(f"one end of a copy must lie in the memory of {self.name}")
        if not (inward or target.flags.writeable):
            raise DeviceError(f"a copy from {self.name} needs writable memory")
        lane = self._inward if inward else self._outward
        return lane.copy(self._end(source, outward), self._end(target, inward), (source, target))

    def start(self, call: Callable[[], T]) -> Pending[T]:
        """Queue a call of this device's kernels behind the calls started before it. Return a pending operation."""
        return self._calls.start(call)

    def staging(self, size: int) -> Bytes:
        """Return `size` zeroed bytes of host memory that this device copies from and to at full speed."""
        return self._staging.allocate(size)

    def close(self) -> None:
        """Wait until all started calls and copies have ended, then end the device's threads."""
        close_all(self._calls.close, self._inward.close, self._outward.close, self._computing.close, self._names.clear)

    def _end(self, array: Bytes, ours: bool) -> Tensor:
        if ours:
            return self._names.tensor(array)
        if not array.flags.c_contiguous:
            raise DeviceError(f"a copy to or from {self.name} needs contiguous bytes; use np.ascontiguousarray")
        return torch.from_numpy(bytes_at(array.ctypes.data, array.size))  # torch warns of arrays that are read-only


def open_cuda(argument: str, limit: int | None = None) -> CudaDevice:
    """Return the card with index `argument` ("": the first), with an arena of `limit` bytes (None: what is free).

    Raises:
        UsageError: if there is no such card, no Triton, or less free memory, or if the card is too old.
    """
    if not torch.cuda.is_available():
        raise UsageError(f"torch {torch.__version__} finds no CUDA card; choose another device, or cpu")
    if find_spec("triton") is None:
        raise UsageError("the kernels for CUDA cards need Triton; run `pip install triton`, or choose another device")
    index = _card(argument, torch.cuda.device_count())
    capability = torch.cuda.get_device_capability(index)
    if capability < OLDEST:
        card, (major, minor) = f"cuda:{index} ({torch.cuda.get_device_name(index)})", capability
        raise UsageError(
            f"{card} has compute capability {major}.{minor}, and the kernels need {'.'.join(map(str, OLDEST))}"
            " (RTX 20, T4) or later; use it with --device opencl, or use --device cpu"
        )
    backend = CudaBackend(index)
    room = backend.room()
    if limit is not None and limit > room:
        raise UsageError(f"{backend.name} has {room} bytes free, not {limit}; give a smaller --gpu-memory")
    return CudaDevice(backend, room if limit is None else limit)


def _card(argument: str, count: int) -> int:
    if argument in {str(index) for index in range(count)} | {""}:
        return int(argument or 0)
    cards = ", ".join(f"cuda:{index} ({torch.cuda.get_device_name(index)})" for index in range(count))
    raise UsageError(f"no card called cuda:{argument}; choose one of {cards}")
