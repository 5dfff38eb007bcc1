"""Buffers for what kernels make on the way, within the memory that weights and pages leave: held to be used again."""

from collections import deque
from collections.abc import Callable
from typing import Any

from tpi.devices.arena import Arena
from tpi.errors import DeviceFullError

_STEP = 256  # bytes: sizes are multiples of it


class PooledBuffer:
    """A buffer that goes back to its pool when nothing refers to it any more."""

    __slots__ = ("_returned", "buffer")

    def __init__(self, buffer: Any, returned: deque[Any]) -> None:
        """`buffer` is a `pyopencl.Buffer`, which is put into `returned` at the end, by whichever thread that is."""
        self.buffer = buffer
        self._returned = returned

    def __del__(self) -> None:
        """See the class."""
        self._returned.append(self.buffer)


class BufferPool:
    """Buffers of one card, each of the size that was asked for, in whole steps. Used by one thread at a time.

    Those that are held are used again for the same size. They are no more than the most that was in use at once: for
    more, those go that were let go longest ago. So what the pool has, is what kernels need, whatever they need next.
    """

    def __init__(self, device: str, create: Callable[[int], Any], finish: Callable[[], None]) -> None:
        """`create` makes a buffer of so many bytes of `device`; `finish` waits for all that uses one."""
        self._device, self._create, self._finish = device, create, finish
        self._returned: deque[Any] = deque()
        self._held: deque[Any] = deque()  # let go longest ago first
        self._most = 0  # bytes in use at once so far
        self._held_bytes = 0
        self.nbytes = 0  # of all buffers, in use or held

    def take(self, size: int, arena: Arena) -> PooledBuffer:
        """A buffer of at least `size` bytes, with anything in it, beside what is in the card's `arena`.

        Raises:
            DeviceFullError: if that leaves no room for it; names the smallest limit that would do.
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
        """Let held buffers go until there are `most` bytes in all, or none is held; returns how many there are."""
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
        """What was let go is held from now on."""
        while self._returned:
            buffer = self._returned.popleft()
            self._held.append(buffer)
            self._held_bytes += buffer.size
