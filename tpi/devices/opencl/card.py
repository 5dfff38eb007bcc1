"""An OpenCL device as its kernels and copies use it: compute queue, programs, arena, and buffers of activations."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import RLock
from typing import Any

import numpy as np

from tpi.devices.arena import Arena, Array
from tpi.devices.failures import close_all, explained, reason
from tpi.devices.opencl.addresses import Addresses
from tpi.devices.opencl.buffers import BufferPool, PooledBuffer
from tpi.devices.opencl.discover import opencl
from tpi.devices.opencl.programs import Program, Programs
from tpi.devices.pages import PAGE
from tpi.errors import DeviceError
from tpi.kernels.spec import F32

LANES = 64  # work-items of a work-group, as in common.cl


class OpenClCard:
    """One device: an in-order queue, and buffers from a pool. `working` lets one thread use it at a time."""

    def __init__(self, name: str, device: Any, limit: int) -> None:
        """Open `device`, a `pyopencl.Device`.

        `limit` bytes are for its arena and the buffers of activations together.
        """
        cl = opencl()
        self.name = name
        self.device = device
        with self.explained():
            self.context = cl.Context([device])
            self._queue = cl.CommandQueue(self.context)
        self.addresses = Addresses(name, self._create, self.largest)
        self._programs = Programs(self.context)
        self._pool = BufferPool(name, partial(cl.Buffer, self.context, cl.mem_flags.READ_WRITE), self._queue.finish)
        self._lock = RLock()
        self.memory = Arena(
            name, limit, self.addresses.allocate, self.addresses.release, self._trimmed, self.addresses.allocate_cut
        )

    def largest(self) -> int:
        """Return the most bytes that the device allocates in one piece."""
        with self.explained():
            return int(self.device.max_mem_alloc_size) // PAGE * PAGE

    @property
    def working_bytes(self) -> int:
        """Bytes in addition to the arena: activations of running calls, free buffers of the pool, vectors of specs."""
        return self._pool.nbytes

    @contextmanager
    def working(self) -> Iterator[None]:
        """Lock the compute queue for the block; raise errors of OpenCL as DeviceError."""
        with self._lock, self.explained():
            yield

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raise errors of OpenCL or its driver as a DeviceError that names the device."""
        try:
            with explained(f"{self.name} failed", "give a smaller --gpu-memory, or choose another device"):
                yield
        except DeviceError as error:
            if isinstance(error.__cause__, opencl().MemoryError):
                raise DeviceError(
                    f"{self.name} has no memory left ({reason(error.__cause__)}): give a smaller --gpu-memory"
                ) from error
            raise

    def launch(self, program: Program, kernel: str, groups: Sequence[int], *arguments: Any) -> None:
        """Enqueue a kernel over `groups` work-groups of LANES work-items; do nothing if a dimension is 0.

        Integers are passed as int, floats as float; an array of the device must be passed as `located` returns it.
        """
        if 0 in groups:
            return
        size = (groups[0] * LANES, *groups[1:])
        local = (LANES, *(1 for _ in groups[1:]))
        self._programs.kernel(program, kernel)(self._queue, size, local, *map(_argument, arguments))

    def empty(self, *shape: int) -> PooledBuffer:
        """Return a pooled buffer for 4-byte values of this shape, with any content."""
        return self._pool.take(4 * int(np.prod(shape, dtype=np.int64)), self.memory)

    def zeros(self, *shape: int) -> PooledBuffer:
        """Return a pooled buffer for 4-byte values of this shape, filled with zeros."""
        taken = self.empty(*shape)
        opencl().enqueue_fill_buffer(self._queue, taken.buffer, np.uint8(0), 0, taken.buffer.size)
        return taken

    def upload(self, array: Array) -> PooledBuffer:
        """Return a buffer with the values of a contiguous array of 4-byte values; the array may change at once."""
        taken = self.empty(array.size)
        if array.size:
            opencl().enqueue_copy(self._queue, taken.buffer, np.ascontiguousarray(array), is_blocking=True)
        return taken

    def download(self, taken: PooledBuffer, *shape: int) -> F32:
        """Wait for all queued work, and return a buffer's floats as an array."""
        out = np.empty(shape, np.float32)
        if out.size:
            opencl().enqueue_copy(self._queue, out, taken.buffer, is_blocking=True)
        return out

    def finish(self) -> None:
        """Wait for all queued work."""
        self._queue.finish()

    def located(self, array: Array) -> tuple[Any, np.uint64]:
        """Return a kernel's arguments for an array of the device: its buffer, and its offset in that."""
        if not array.size:
            return None, np.uint64(0)
        buffer, offset = self.addresses.locate(array)
        return buffer, np.uint64(offset)

    def close(self) -> None:
        """Wait for all queued kernels and copies, then release all memory. Further calls do nothing."""
        with self._lock:
            close_all(self._queue.finish, self._pool.trim, self.addresses.close)

    def _trimmed(self, room: int) -> int:
        """Release free buffers beyond `room` bytes; return the bytes that the kernels' buffers still take."""
        with self.working():
            return self._pool.trim(room)

    def _create(self, size: int) -> Any:
        """Return a new buffer filled with zeros. Writing them makes sure that the driver has memory for the buffer."""
        cl = opencl()
        most = self.largest()
        if size > most:
            raise DeviceError(
                f"{self.name} allocates at most {most} bytes in one piece, not {size}: give a smaller --gpu-memory"
            )
        with self.explained():
            buffer = cl.Buffer(self.context, cl.mem_flags.READ_WRITE, size)
            with self._lock:
                cl.enqueue_fill_buffer(self._queue, buffer, np.uint8(0), 0, size)
                self._queue.finish()
        return buffer


def _argument(value: Any) -> Any:
    if isinstance(value, PooledBuffer):
        return value.buffer
    if isinstance(value, (bool, int)):
        return np.int32(value)
    return np.float32(value) if isinstance(value, float) else value
