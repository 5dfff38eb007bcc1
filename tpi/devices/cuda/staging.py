"""Host memory that a card copies from and to at full speed: ordinary pages that its driver pins in place.

Torch's own pinned allocations are rounded up to a power of two and never released, which no budget accounts for.
"""

from collections.abc import Callable
from threading import Lock
from weakref import finalize

import numpy as np

from tpi.devices.cuda.backend import TorchBackend
from tpi.devices.pages import Bytes, page_buffer
from tpi.progress import warn


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
