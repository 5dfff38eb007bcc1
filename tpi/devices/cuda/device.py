"""A card as a device, and how it is opened. It has never run on one: experimental."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import TypeVar

import torch

from tpi.devices.arena import Arena
from tpi.devices.base import Event, Pending
from tpi.devices.cuda.backend import CudaBackend, Tensor, TorchBackend
from tpi.devices.cuda.copies import CudaCopies
from tpi.devices.cuda.staging import Staging
from tpi.devices.cuda.tensors import TensorNames, bytes_at
from tpi.devices.failures import close_all
from tpi.devices.host import check_sizes
from tpi.devices.inorder import InOrder
from tpi.devices.pages import Bytes
from tpi.errors import DeviceError, UsageError
from tpi.kernels import Kernels

T = TypeVar("T")
OLDEST = (7, 5)  # compute capability of the oldest cards (Turing) that every program is compiled for in tests


class CudaDevice:
    """Memory, copies and kernels of one card. See `tpi.devices.base.Device`.

    Results cross to the host within a call, so that one that has ended has computed. Copies have streams of their own,
    one for each direction; they overlap with computing where the host's end is of `staging`.
    """

    def __init__(self, backend: TorchBackend, limit: int | None = None) -> None:
        """`limit` is of the arena, in bytes; what kernels make on the way comes on top of it."""
        from tpi.devices.cuda.kernels import CudaKernels  # loads Triton

        self.name = backend.name
        self._backend = backend
        self._names = TensorNames(backend)
        self.memory = Arena(self.name, limit, self._names.allocate, self._names.release)
        self._computing = CudaKernels(backend, self.memory, self._names)
        self.kernels: Kernels = self._computing
        self._staging = Staging(backend)
        self._calls = InOrder(f"{self.name} compute")
        self._inward, self._outward = (CudaCopies(self.name, backend.lane()) for _ in range(2))

    @property
    def identity(self) -> str:
        """See `tpi.devices.base.Identified`."""
        return self._backend.identity

    @property
    def shares_memory(self) -> bool:
        """See `tpi.devices.base.Sharing`."""
        return self._backend.shares_memory

    def copy(self, source: Bytes, target: Bytes) -> Event:
        """See `Device.copy`; both ends must be contiguous."""
        check_sizes(source, target)
        inward, outward = self.memory.owns(target), self.memory.owns(source)
        if not (inward or outward):
            raise DeviceError(f"one end of a copy must lie in the memory of {self.name}")
        if not (inward or target.flags.writeable):
            raise DeviceError(f"a copy from {self.name} needs memory that may be written")
        lane = self._inward if inward else self._outward
        return lane.copy(self._end(source, outward), self._end(target, inward), (source, target))

    def start(self, call: Callable[[], T]) -> Pending[T]:
        """See `Device.start`."""
        return self._calls.start(call)

    def staging(self, size: int) -> Bytes:
        """See `Device.staging`."""
        return self._staging.allocate(size)

    def close(self) -> None:
        """See `Device.close`."""
        close_all(self._calls.close, self._inward.close, self._outward.close, self._computing.close, self._names.clear)

    def _end(self, array: Bytes, ours: bool) -> Tensor:
        if ours:
            return self._names.tensor(array)
        if not array.flags.c_contiguous:
            raise DeviceError(f"a copy to or from {self.name} is of contiguous bytes; copy them together first")
        return torch.from_numpy(bytes_at(array.ctypes.data, array.size))  # torch warns of what is read-only


def open_cuda(argument: str, limit: int | None = None) -> CudaDevice:
    """The card whose index is `argument` ("": the first), with an arena of `limit` bytes, or of what is free on it.

    Raises:
        UsageError: if there is no such card, or no Triton, or less memory, or it is too old; says what there is.
    """
    if not torch.cuda.is_available():
        raise UsageError(f"no CUDA card can be used here by torch {torch.__version__}; choose another device, or cpu")
    if find_spec("triton") is None:
        raise UsageError("the kernels for CUDA cards need Triton; run `pip install triton`, or choose another device")
    index = _card(argument, torch.cuda.device_count())
    capability = torch.cuda.get_device_capability(index)
    if capability < OLDEST:
        card, (major, minor) = f"cuda:{index} ({torch.cuda.get_device_name(index)})", capability
        raise UsageError(
            f"{card} has compute capability {major}.{minor}, and the kernels need {'.'.join(map(str, OLDEST))}"
            " (RTX 20, T4) or later; use it with --device opencl, or leave it out with --device cpu"
        )
    backend = CudaBackend(index)
    room = backend.room()
    if limit is not None and limit > room:
        raise UsageError(f"{backend.name} has room for {room} bytes, not for {limit}; give it a smaller limit")
    return CudaDevice(backend, room if limit is None else limit)


def _card(argument: str, count: int) -> int:
    """The index that the user named, of `count` cards."""
    if argument in {str(index) for index in range(count)} | {""}:
        return int(argument or 0)
    cards = ", ".join(f"cuda:{index} ({torch.cuda.get_device_name(index)})" for index in range(count))
    raise UsageError(f"no card called cuda:{argument}; there are {cards}")
