"""Memory of the host that a card copies from and to at full speed: pages of our own that its driver pins in place.

Torch's own pinned allocations are rounded up to a power of two and never given back, which no budget knows of.
"""

from collections.abc import Callable
from threading import Lock
from weakref import finalize

import numpy as np

from tpi.devices.cuda.backend import TorchBackend
from tpi.devices.pages import Bytes, page_buffer
from tpi.progress import warn


class _Owner:
    """What every array over some pages refers to in the end: the pages are unpinned before they go."""

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        self.__array_interface__ = memory.__array_interface__


class Staging:
    """The pinned memory of one card. May be used by several threads."""

    def __init__(self, backend: TorchBackend) -> None:
        self._backend = backend
        self._lock = Lock()
        self._pins: list[finalize[..., _Owner]] = []
        self._refused = False

    def allocate(self, size: int) -> Bytes:
        """Return `round_up(size)` zeroed bytes from the start of a page on, pinned until nothing refers to them.

        Where the driver refuses to pin them they are ordinary memory, which is said once.
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
        """Unpin everything, when no copy uses it any more; it stays as ordinary memory. Idempotent."""
        with self._lock:
            pins, self._pins = self._pins, []
        for pin in pins:
            pin()

    def _pinned(self, memory: Bytes) -> Callable[[], object] | None:
        try:
            unpin = self._backend.pin(memory.ctypes.data, memory.size)
        except Exception:  # noqa: BLE001 - copies work without, and a card that failed says so where they are awaited
            unpin = None
        if unpin is None and not self._refused:
            self._refused = True
            name, size = self._backend.name, memory.size >> 20
            warn(f"{name}: its driver does not pin {size}MiB of memory; copies from there and to it are slower")
        return unpin
