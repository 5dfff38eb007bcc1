"""The embedding and the head of a pack, in memory or on disk as the master's budget says."""

from contextlib import ExitStack
from types import TracebackType

from master.vocabulary import Embedding, Head, ResidentTable, Table
from scheduler.budget import Budget
from scheduler.disk import DirectDisk, read_extent
from scheduler.extent import Extent
from scheduler.memory import page_buffer
from scheduler.stats import WindowStats
from scheduler.tables import RowTable, StreamedTable
from tpi.pack.reader import Block, Pack
from worker.fit import Tables


class Ends:
    """What stands before the first block and after the last; a context manager that stops what streams."""

    def __init__(self, pack: Pack, budget: Budget) -> None:
        config, final = pack.config, pack.final.vectors()
        self._stack = ExitStack()
        self._streams: list[StreamedTable] = []
        self._streamed = WindowStats()
        head = self._head_table(pack.head, budget.head_bytes)
        embedding = head if pack.head is pack.embedding else self._embedding_table(pack.embedding, budget)
        positions = _resident(pack.positions) if pack.positions else None
        self.embedding = Embedding(config, embedding, positions)
        self.head = Head(config, head, final["norm"], final.get("norm.bias"))

    @property
    def streamed(self) -> WindowStats:
        """What was read for the head so far, and waited for; nothing if it is in memory."""
        for stream in self._streams:
            self._streamed += stream.take()
        return self._streamed

    def __enter__(self) -> "Ends":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _head_table(self, block: Block, budget: int) -> Table:
        if table_block_bytes(block) <= budget:
            return _resident(block)
        table = StreamedTable(block.run("row"), _extent(block), budget)
        self._stack.callback(table.close)
        self._streams.append(table)
        return table

    def _embedding_table(self, block: Block, budget: Budget) -> "ResidentTable | RowTable":
        if table_block_bytes(block) <= budget.embedding_bytes:
            return _resident(block)
        return RowTable(block.run("row"), _extent(block))


def table_bytes(pack: Pack) -> Tables:
    """Bytes of the tables that the master has to find room for."""
    tied = pack.head is pack.embedding
    return Tables(table_block_bytes(pack.head), 0 if tied else table_block_bytes(pack.embedding))


def table_block_bytes(block: Block) -> int:
    """Bytes of memory that a table takes: whole pages."""
    return _extent(block).slot_bytes


def _resident(block: Block) -> ResidentTable:
    extent = _extent(block)
    return ResidentTable(block.run("row"), read_extent(DirectDisk(), extent, page_buffer(extent.slot_bytes)))


def _extent(block: Block) -> Extent:
    found = block.extent("row")
    return Extent(found.path, found.offset, found.nbytes)
