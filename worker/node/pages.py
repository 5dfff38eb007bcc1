"""Page tables as the master announces them: from a step's entries to the kernels' batch. Same on every node."""

from collections.abc import Iterable, Sequence

import numpy as np

from tpi.errors import MessageError
from tpi.kernels.spec import Batch
from tpi.net.messages import StepEntry


class PageTables:
    """The pages of keys and values of every live sequence.

    An entry names how many of its sequence's pages stay, and those appended: so tables grow, are truncated, and share
    pages that another sequence filled.
    """

    def __init__(self, pages: int, page_tokens: int) -> None:
        self._pages = pages
        self._page_tokens = page_tokens
        self._tables: dict[int, list[int]] = {}

    def batch(self, entries: Sequence[StepEntry]) -> Batch:
        """Bring the tables up to date and lay the step's tokens out in the order of `entries`.

        Raises:
            MessageError: if a page does not exist, a sequence's table is too short for its tokens, or one comes twice.
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
        """Forget sequences whose pages the master has taken back."""
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
