"""Page tables, which are the same on every node: they turn the entries of a step into a batch for the kernels."""

from collections.abc import Iterable, Sequence

import numpy as np

from tpi.errors import MessageError
from tpi.kernels.spec import Batch
from tpi.net.messages import StepEntry


class PageTables:
    """The numbers of each sequence's KV pages.

    An entry of a step says how many pages its sequence keeps and which ones are appended. So tables can grow, be
    truncated, and share pages that another sequence filled.
    """

    def __init__(self, pages: int, page_tokens: int) -> None:
        self._pages = pages
        self._page_tokens = page_tokens
        self._tables: dict[int, list[int]] = {}

    def batch(self, entries: Sequence[StepEntry]) -> Batch:
        """Update the tables, and return the batch of the step's tokens, in the order of `entries`.

        Raises:
            MessageError: if a page does not exist, if a table is too short for the tokens of its sequence, or if two
                entries have the same sequence.
        """
        if len({entry.sequence for entry in entries}) < len(entries):
            raise MessageError("step names a sequence twice")
        for entry in entries:
            self._update(entry)
        positions = [position for e in entries for position in range(e.position, e.position + e.count)]
        rows = [row for row, entry in enumerate(entries) for _ in range(entry.count)]
        tables = [self._tables[entry.sequence] for entry in entries]
        longest = max(map(len, tables), default=0)
        padded = [table + [0] * (longest - len(table)) for table in tables]
        return Batch(*(np.array(values, np.int32) for values in (positions, rows, padded)))

    def release(self, sequences: Iterable[int]) -> None:
        """Delete the tables of `sequences`, whose pages the master has freed."""
        for sequence in sequences:
            self._tables.pop(sequence, None)

    def _update(self, entry: StepEntry) -> None:
        table = self._tables.setdefault(entry.sequence, [])
        if entry.kept > len(table):
            raise MessageError(f"step keeps {entry.kept} pages of sequence {entry.sequence}, which has {len(table)}")
        if len(self._tables) > self._pages or entry.kept + len(entry.appended) > self._pages:
            raise MessageError(f"step's tables name more than the {self._pages} pages that this node has")
        if any(not 0 <= page < self._pages for page in entry.appended):
            raise MessageError(f"step names a page beyond the {self._pages} that this node has")
        table[entry.kept :] = entry.appended
        if entry.position + entry.count > len(table) * self._page_tokens:
            raise MessageError(f"step runs sequence {entry.sequence} past its pages")
