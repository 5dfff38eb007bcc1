"""KV tables as the master announces them: from a step's entries to the kernels' batch. Same on every node."""

from collections.abc import Iterable, Sequence

import numpy as np

from tpi.errors import MessageError
from tpi.kernels.spec import Batch
from tpi.messages import StepEntry


class BlockTables:
    """The KV blocks of every live sequence; grows by what each step appends."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self._blocks = blocks
        self._block_tokens = block_tokens
        self._tables: dict[int, list[int]] = {}

    def batch(self, entries: Sequence[StepEntry]) -> Batch:
        """Take in the appended blocks and lay the step's tokens out in the order of `entries`.

        Raises:
            MessageError: if a block does not exist, a sequence's table is too short for its tokens, or one comes twice.
        """
        if len({entry.sequence for entry in entries}) < len(entries):
            raise MessageError("step names a sequence twice")
        for entry in entries:
            self._extend(entry)
        positions = [position for e in entries for position in range(e.position, e.position + e.count)]
        rows = [row for row, entry in enumerate(entries) for _ in range(entry.count)]
        tables = [self._tables[entry.sequence] for entry in entries]
        longest = max(map(len, tables), default=0)
        padded = [table + [0] * (longest - len(table)) for table in tables]
        return Batch(*(np.array(values, np.int32) for values in (positions, rows, padded)))

    def release(self, sequences: Iterable[int]) -> None:
        """Forget sequences whose blocks the master has taken back."""
        for sequence in sequences:
            self._tables.pop(sequence, None)

    def _extend(self, entry: StepEntry) -> None:
        table = self._tables.setdefault(entry.sequence, [])
        if len(self._tables) > self._blocks or len(table) + len(entry.appended) > self._blocks:
            raise MessageError(f"step's tables name more than the {self._blocks} KV blocks that this node has")
        if any(not 0 <= block < self._blocks for block in entry.appended):
            raise MessageError(f"step names a KV block beyond the {self._blocks} that this node has")
        table.extend(entry.appended)
        if entry.position + entry.count > len(table) * self._block_tokens:
            raise MessageError(f"step runs sequence {entry.sequence} past its KV blocks")
