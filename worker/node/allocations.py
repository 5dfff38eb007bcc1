"""Resident weights and KV pages in the arenas of a node's devices."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np

from scheduler.storage.disk import Disk, read_extent
from scheduler.storage.extent import Extent
from tpi.devices.base import Device
from tpi.devices.pages import Bytes
from tpi.kernels.kv import KvPages
from worker.node_plan import NodePlan


class DeviceAllocations:
    """Memory of one node in the arenas of its devices; `close` frees all of it."""

    def __init__(self) -> None:
        self._held: list[tuple[Device, Bytes]] = []

    def load(
        self, device: Device, pieces: Sequence[Extent], disk: Disk, check: Callable[[Bytes], None] | None = None
    ) -> Bytes:
        """Read `pieces` into the memory of `device`, back to back, and return that memory.

        `check` gets the bytes before they are copied to the device, and raises if they are wrong.

        Raises:
            WeightsError: if a file cannot be read. The message names the file.
            DeviceFullError: if the device has too little free memory.
        """
        data = self.allocate(device, sum(piece.nbytes for piece in pieces))
        parts: Iterator[Bytes] = (
            read_extent(disk, piece, device.staging(piece.slot_bytes)) for piece in pieces if piece.nbytes
        )
        if check is not None and data.size:
            whole = np.concatenate(list(parts))
            check(whole)
            parts = iter([whole])
        end = 0
        for part in parts:
            begin, end = end, end + part.size
            device.copy(part, data[begin:end]).wait()
        return data

    def allocate(self, device: Device, size: int, cuts: Sequence[int] = ()) -> Bytes:
        """Return `size` zeroed bytes of the memory of `device`; `cuts` is passed to `Arena.allocate`.

        Raises:
            DeviceFullError: if the device has too little free memory.
        """
        memory = device.memory.allocate(size, cuts)
        self._held.append((device, memory))
        return memory

    def pages(self, device: Device, plan: NodePlan, layers: Iterable[int], pages: int, kv_heads: int) -> KvPages:
        """Allocate `pages` pages of `kv_heads` KV heads for each of `layers` on `device`.

        Raises:
            DeviceFullError: if the device has too little free memory.
        """
        dtype, memory = plan.options.kv_dtype, partial(self.allocate, device)
        return KvPages.allocate(layers, pages, kv_heads, plan.config.head_dim, dtype, memory)

    def close(self) -> None:
        """Free all memory. May be called twice."""
        while self._held:
            device, memory = self._held.pop()
            device.memory.free(memory)
