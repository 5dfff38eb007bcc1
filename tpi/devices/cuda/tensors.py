"""Tensors of a device, and numpy arrays that stand for them at the same addresses.

CUDA's addresses are unified: no byte of the host has the address of a byte of a card. So an array may stand for memory
that the host cannot reach. It may be sliced, viewed and reshaped, but its bytes must not be accessed.
"""

import ctypes
from bisect import bisect_right, insort
from threading import Lock

import numpy as np
import torch

from tpi.devices.arena import Array, as_address_only
from tpi.devices.cuda.backend import Tensor, TorchBackend
from tpi.devices.failures import explained
from tpi.devices.pages import PAGE, Bytes
from tpi.errors import DeviceError

_TYPES = {
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int8): torch.int8,
    np.dtype(np.float16): torch.float16,
    np.dtype(np.float32): torch.float32,
}


class TensorTable:
    """The tensors of one device, found by the addresses of the arrays that stand for them. Several threads may use
    it at once.
    """

    def __init__(self, backend: TorchBackend) -> None:
        self._backend = backend
        self._lock = Lock()
        self._tensors: dict[int, Tensor] = {}  # by address
        self._starts: list[int] = []  # ascending

    def allocate(self, size: int) -> Bytes:
        """Allocate `size` zeroed bytes, aligned to a page; return the array that stands for them.

        Raises:
            DeviceError: if the device has no memory left.
        """
        if not size:
            return np.empty(0, np.uint8)
        try:
            with explained(f"{self._backend.name} failed", "choose another device"):
                memory = self._backend.zeros(size + PAGE)
        except DeviceError as error:
            if isinstance(error.__cause__, MemoryError):
                raise DeviceError(
                    f"{self._backend.name} does not have {size} bytes left; give a smaller --gpu-memory"
                ) from error
            raise
        begin = -memory.data_ptr() % PAGE
        start = memory.data_ptr() + begin
        with self._lock:
            self._tensors[start] = memory[begin : begin + size]
            insort(self._starts, start)
        return bytes_at(start, size)

    def release(self, name: Bytes) -> None:
        """Release the memory of an array that `allocate` returned; do nothing if it was released before."""
        start = name.ctypes.data
        with self._lock:
            if self._tensors.pop(start, None) is not None:
                self._starts.remove(start)

    def clear(self) -> None:
        """Release all memory."""
        with self._lock:
            self._tensors.clear()
            self._starts.clear()

    def tensor(self, array: Array) -> Tensor:
        """Return the tensor of a contiguous array, with its shape and dtype: uint8, int8, float16 or float32.

        Raises:
            DeviceError: if the array is not contiguous, or not in the memory of this device.
        """
        if array.dtype not in _TYPES or not array.flags.c_contiguous:
            raise DeviceError(f"memory of {self._backend.name} must be contiguous uint8, int8, float16 or float32")
        kind = _TYPES[array.dtype]
        if not array.size:
            return torch.empty(array.shape, dtype=kind, device=self._backend.device)
        start = array.ctypes.data
        with self._lock:
            at = bisect_right(self._starts, start) - 1
            held = self._tensors[self._starts[at]] if at >= 0 else None
        if held is None or start + array.nbytes > held.data_ptr() + held.numel():
            raise DeviceError(f"this array is not in the memory of {self._backend.name}, or was freed")
        begin = start - held.data_ptr()
        return held[begin : begin + array.nbytes].view(kind).reshape(array.shape)


def bytes_at(address: int, size: int) -> Bytes:
    """Return an array over `size` bytes at an address; it keeps no memory alive."""
    return as_address_only(np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)))
