"""A pool of buffers for the kernels' temporary values, in the memory that weights and pages leave free."""

from collections import deque
from collections.abc import Callable
from typing import Any

from tpi.devices.arena import Arena
from tpi.errors import DeviceFullError

_STEP = 256  # bytes; sizes are multiples of it


class PooledBuffer:
    """A buffer that returns to its pool when no object refers to it any more."""

    __slots__ = ("_returned", "buffer")

    def __init__(self, buffer: Any, returned: deque[Any]) -> None:
        """Wrap `buffer`, a `pyopencl.Buffer`. When this object is deleted, any thread may append it to `returned`."""
        self.buffer = buffer
        self._returned = returned

    def __del__(self) -> None:
        """Return the buffer to its pool."""
        self._returned.append(self.buffer)


class BufferPool:
    """A pool of one card's buffers, whose sizes are multiples of 256 bytes. Only one thread at a time may use it.

    Free buffers are reused for the same size. The pool grows to the most bytes that were in use at once, and no
    further: before it creates another buffer, it releases the free ones that were unused for longest.
    """

    def __init__(self, device: str, create: Callable[[int], Any], finish: Callable[[], None]) -> None:
        """Create the pool; `create` returns a buffer of the given bytes, `finish` waits for all calls that use one."""
        self._device, self._create, self._finish = device, create, finish
        self._returned: deque[Any] = deque()
        self._held: deque[Any] = deque()  # the longest unused first
        self._most = 0  # most bytes in use at once so far
        self._held_bytes = 0
        self.nbytes = 0  # bytes of all buffers, in use or free

    def take(self, size: int, arena: Arena) -> PooledBuffer:
        """Return a buffer of at least `size` bytes with any content; it must fit in addition to the card's `arena`.

        Raises:
            DeviceFullError: if there is no room for it; the error names the smallest sufficient limit.
        """
        size = -(-max(1, size) // _STEP) * _STEP
        self._collect()
        found = next((buffer for buffer in self._held if buffer.size == size), None)
        if found is None:
            return PooledBuffer(self._made(size, arena), self._returned)
        self._held.remove(found)
        self._held_bytes -= size
        self._most = max(self._most, self.nbytes - self._held_bytes)
        return PooledBuffer(found, self._returned)

    def trim(self, most: int = 0) -> int:
        """Release free buffers until at most `most` bytes are left, or none is free; return the bytes left."""
        self._collect()
        if self.nbytes > most and self._held:
            self._finish()
        while self.nbytes > most and self._held:
            buffer = self._held.popleft()
            self._held_bytes -= buffer.size
            self.nbytes -= buffer.size
            buffer.release()
        return self.nbytes

    def _made(self, size: int, arena: Arena) -> Any:
        most = max(self._most, self.nbytes - self._held_bytes + size)
        room = most if arena.limit is None else min(most, arena.limit - arena.used)
        taken = arena.used + self.trim(room - size) + size
        if arena.limit is not None and taken > arena.limit:
            raise DeviceFullError(self._device, arena.limit, taken)
        buffer = self._create(size)
        self.nbytes += size
        self._most = most
        return buffer

    def _collect(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            self._held.append(buffer)
            self._held_bytes += buffer.size
