"""Weights and pages in the arenas of a node's devices: allocated there, filled by copies, given back together."""

from collections.abc import Sequence
from functools import partial

from scheduler.storage.disk import Disk, read_extent
from scheduler.storage.extent import Extent
from tpi.devices.base import Device
from tpi.devices.pages import Bytes, page_buffer
from tpi.kv import KvPages
from worker.plan.node_plan import NodePlan


class Placed:
    """What of one node stays in the arenas of its devices."""

    def __init__(self) -> None:
        self._held: list[tuple[Device, Bytes]] = []

    def load(self, device: Device, pieces: Sequence[Extent], disk: Disk) -> Bytes:
        """The bytes of `pieces`, back to back, in the memory of `device`.

        Raises:
            WeightsError: if a file cannot be read; names it.
            DeviceFullError: if the device has no room for them.
        """
        data, end = self._allocate(device, sum(piece.nbytes for piece in pieces)), 0
        for piece in pieces:
            if piece.nbytes:
                begin, end = end, end + piece.nbytes
                device.copy(read_extent(disk, piece, page_buffer(piece.slot_bytes)), data[begin:end]).wait()
        return data

    def pages(self, device: Device, plan: NodePlan, pages: int, kv_heads: int) -> KvPages:
        """Room for so many pages of `kv_heads` KV heads on `device`. Errors as `load`."""
        config, dtype = plan.config, plan.options.kv_dtype
        memory = partial(self._allocate, device)
        return KvPages.allocate(config.layers, pages, kv_heads, config.head_dim, dtype, memory)

    def close(self) -> None:
        """Give all of it back. Idempotent."""
        while self._held:
            device, memory = self._held.pop()
            device.memory.free(memory)

    def _allocate(self, device: Device, size: int) -> Bytes:
        memory = device.memory.allocate(size)
        self._held.append((device, memory))
        return memory
