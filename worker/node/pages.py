"""Page tables, which are the same on every node: they turn the entries of a step into a batch for the kernels."""

from collections.abc import Iterable, Sequence

import numpy as np

from tpi.errors import MessageError
from tpi.kernels.spec import STREAM_TOKENS, Batch
from tpi.net.messages import StepEntry


class PageTables:
    """The numbers of each sequence's KV pages.

    An entry of a step says how many pages its sequence keeps and which ones are appended. So tables can grow, be
    truncated, and share pages that another sequence filled.
    """

    def __init__(self, pages: int, page_tokens: int, states: int = 0) -> None:
        """Create empty tables for `pages` pages of `page_tokens` tokens, and `states` recurrent states (0 for none)."""
        self._pages = pages
        self._states = states
        self._held: dict[int, range] = {}  # by slot: the numbers of tokens from which its state can be continued
        self._page_tokens = page_tokens
        self._tables: dict[int, list[int]] = {}

    def batch(self, entries: Sequence[StepEntry]) -> Batch:
        """Update the tables, and return the batch of the step's tokens, in the order of `entries`.

        Raises:
            MessageError: if a page or a state does not exist, if a table is too short for the tokens of its sequence,
                if a state does not continue at the position of its sequence, or if two entries have the same sequence
                or touch the same state.
        """
        if len({entry.sequence for entry in entries}) < len(entries):
            raise MessageError("step names a sequence twice")
        for entry in entries:
            self._update(entry)
        self._check_states(entries)
        positions = [position for e in entries for position in range(e.position, e.position + e.count)]
        rows = [row for row, entry in enumerate(entries) for _ in range(entry.count)]
        tables = [self._tables[entry.sequence] for entry in entries]
        longest = max(map(len, tables), default=0)
        padded = [table + [0] * (longest - len(table)) for table in tables]
        return Batch(
            np.array(positions, np.int32),
            np.array(rows, np.int32),
            np.array(padded, np.int32),
            np.array(self._continue(entries, len(positions)), np.int32).reshape(-1, 4) if self._states else None,
        )

    def release(self, sequences: Iterable[int]) -> None:
        """Delete the tables of `sequences`, whose pages the master has freed."""
        for sequence in sequences:
            self._tables.pop(sequence, None)

    def _check_states(self, entries: Sequence[StepEntry]) -> None:
        """Check that each entry reads and writes existing states, and that no two entries use the same state."""
        written = [entry.write for entry in entries]
        if not self._states:
            if any(written) or any(entry.read for entry in entries):
                raise MessageError("step names a state, but this model has none")
            return
        if any(not 1 <= entry.write <= self._states or not 0 <= entry.read <= self._states for entry in entries):
            raise MessageError(f"step names a state beyond the {self._states} that this node has")
        others = [entry.read for entry in entries if entry.read != entry.write]
        if len(set(written)) < len(written) or not set(written).isdisjoint(others):
            raise MessageError("step writes a state that another sequence uses")
        if any(not entry.read and entry.position for entry in entries):
            raise MessageError("step continues a sequence without its state")
        if any(entry.read and entry.position not in self._held.get(entry.read, ()) for entry in entries):
            raise MessageError("step continues a sequence from a state of other tokens")

    def _continue(self, entries: Sequence[StepEntry], tokens: int) -> list[tuple[int, int, int, int]]:
        """Return the states of a step of `tokens` tokens, as `Batch.states` has them, and note what it will write."""
        found = []
        for entry in entries:
            taken = entry.position - self._held[entry.read].start if entry.read else 0
            later = entry.count - 1 if tokens <= STREAM_TOKENS else 0
            found.append((entry.read - 1, entry.write - 1, taken, later))
        for entry, (*_, later) in zip(entries, found, strict=True):
            end = entry.position + entry.count
            self._held[entry.write] = range(end - later, end + 1)
        return found

    def _update(self, entry: StepEntry) -> None:
        table = self._tables.setdefault(entry.sequence, [])
        if entry.kept > len(table):
            raise MessageError(f"step keeps {entry.kept} pages of sequence {entry.sequence}, which has {len(table)}")
        if len(self._tables) > self._pages or entry.kept + len(entry.appended) > self._pages:
            raise MessageError(f"the page tables of a step name more than the {self._pages} pages that this node has")
        if any(not 0 <= page < self._pages for page in entry.appended):
            raise MessageError(f"step names a page beyond the {self._pages} that this node has")
        table[entry.kept :] = entry.appended
        if entry.position + entry.count > len(table) * self._page_tokens:
            raise MessageError(f"step runs sequence {entry.sequence} past its pages")
