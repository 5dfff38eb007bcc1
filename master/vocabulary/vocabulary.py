"""The embedding and the head of a pack, in memory or on disk as the master's budget says."""

from contextlib import ExitStack
from types import TracebackType

import numpy as np
import numpy.typing as npt

from master.vocabulary.streamed import RowTable, StreamedTable
from master.vocabulary.tables import Embedding, Head, PerLayerEmbeddings, ResidentTable, Table
from scheduler.budget import Budget
from scheduler.slots.stats import ReadClock
from scheduler.storage.extent import Extent
from scheduler.window.load import Verify
from scheduler.window.stats import WindowStats
from scheduler.window.window import Resident
from tpi.devices.base import Device
from tpi.devices.host import HostDevice, open_host
from tpi.kernels.spec import NormSpec
from tpi.pack.reader import Pack, PackBlock
from tpi.trace import OFF, NoTrace
from worker.plan.fit import Tables, per_layer_bytes


class Vocabulary:
    """The embedding and the head; a context manager that stops streaming at the end."""

    def __init__(
        self,
        pack: Pack,
        budget: Budget,
        trace: NoTrace = OFF,
        reads: ReadClock | None = None,
        verify: bool = False,
        host: HostDevice | None = None,
    ) -> None:
        """Open the tables.

        `reads` measures the reads of the blocks' window. A streamed head measures its reads with the same clock,
        because both read from the disk at the same time. `host` replaces the real host device. With `verify`, all bytes
        are compared with their hashes when they are first loaded.

        Raises:
            WeightsError: if the pack cannot be read, or with `verify` is damaged.
        """
        config, final = pack.config, pack.final.vectors()
        self._trace, self._reads, self._verify = trace, reads, verify
        self._kernels = (host or open_host()).kernels
        self._streams: list[StreamedTable] = []
        self._rows: list[RowTable] = []
        self._streamed = WindowStats()
        with ExitStack() as self._stack:  # closes a streamed head if the rest fails
            head = self._head_table(pack.head, budget.head_bytes)
            embedding = head if pack.head is pack.embedding else self._embedding_table(pack.embedding, budget)
            positions = self.resident(pack.positions) if pack.positions else None
            self.config = config
            self.embedding = Embedding(config, embedding, positions)
            self.per_layer = self._per_layer(pack, final["per_layer.first_norm"]) if pack.per_layer else None
            norm = NormSpec(config.norm, config.norm_eps, final["norm"], final.get("norm.bias"))
            self._head = head
            self.head = Head(config, head, norm, self._kernels, trace)
            self._stack = self._stack.pop_all()

    @property
    def waits(self) -> tuple[float, float]:
        """The median seconds that a token waited for the head's tiles, and for rows of a separate embedding."""
        return sum(table.waits for table in self._streams), sum(table.waits for table in self._rows)

    @property
    def streamed(self) -> WindowStats:
        """Statistics of reads and waits for the tables so far; empty if the tables are in memory."""
        for table in (*self._rows, *self._streams):  # memory sizes are those of the last table
            self._streamed += table.take()
        return self._streamed

    def compute_head_on(self, device: Device) -> None:
        """Copy the head's table to the memory of `device`, which computes the products with it from now on.

        The embedding keeps its table in the host's memory, also if it is the same. Close the vocabulary before the
        device.

        Raises:
            DeviceError: if the device has too little memory, or fails.
        """
        assert isinstance(self._head, ResidentTable)  # a head that is read from disk is not planned on a device
        run, data = self._head.run, self._head.data
        held = device.memory.allocate(data.size)
        self._stack.callback(device.memory.free, held)
        device.copy(data, held).wait()
        table = ResidentTable(run, held, device.kernels, self._trace)
        self.head = self.head.with_table(table)

    def __enter__(self) -> "Vocabulary":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _head_table(self, block: PackBlock, budget: int) -> Table:
        if table_block_bytes(block) <= budget:
            return self.resident(block)
        verify, found = self._verifier(block), _extent(block)
        table = StreamedTable(
            block.run("row"), found, budget, self._kernels, trace=self._trace, reads=self._reads, verify=verify
        )
        self._stack.callback(table.close)
        self._streams.append(table)
        return table

    def _embedding_table(self, block: PackBlock, budget: Budget) -> "ResidentTable | RowTable":
        if table_block_bytes(block) <= budget.embedding_bytes:
            return self.resident(block)
        return self._on_disk(block)

    def _on_disk(self, block: PackBlock) -> RowTable:
        table = RowTable(
            block.run("row"), _extent(block), self._kernels, trace=self._trace, verify=self._verifier(block)
        )
        self._rows.append(table)
        return table

    def _per_layer(self, pack: Pack, weight: npt.NDArray[np.float32]) -> PerLayerEmbeddings:
        """Open the per-layer embeddings; their table stays on disk, because it is often larger than all layers."""
        table, projection = pack.per_layer
        norm = NormSpec("rms", pack.config.norm_eps, weight)
        return PerLayerEmbeddings(pack.config, self._on_disk(table), self.resident(projection), norm, self._kernels)

    def resident(self, block: PackBlock) -> ResidentTable:
        """Load a table of the pack, and return it."""
        (data,) = Resident([_extent(block)], verify=self._verifier(block)).kept
        return ResidentTable(block.run("row"), data, self._kernels, self._trace)

    def _verifier(self, block: PackBlock) -> Verify | None:
        return block.verifier("row") if self._verify else None


def table_bytes(pack: Pack) -> Tables:
    """Return the bytes of the tables for which the master needs room."""
    tied = pack.head is pack.embedding
    shapes = [block.shape for block in pack.per_layer]
    return Tables(
        table_block_bytes(pack.head),
        0 if tied else table_block_bytes(pack.embedding),
        per_layer=per_layer_bytes(*shapes) if shapes else 0,
    )


def table_block_bytes(block: PackBlock) -> int:
    """Return the bytes of memory that a table takes: whole pages."""
    return _extent(block).slot_bytes


def _extent(block: PackBlock) -> Extent:
    return Extent(block.path, block.offset("row"), block.run("row").nbytes)
