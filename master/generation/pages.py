"""Allocation of pages of keys and values: the master decides for every node which page holds which tokens.

A page table lists a sequence's pages in order. Three things happen to one: pages are *appended* as the sequence grows,
*shared* with another sequence that begins alike, and *truncated* when tokens are taken back. A page that several
sequences hold is never written to: only full pages are shared, and a shared one is never the last to grow into.
"""

from collections import Counter

from tpi.errors import PlanError
from tpi.kernels.spec import PAGE_TOKENS
from tpi.kv import pages_for


class PagePool:
    """A free list over a deployment's pages; there are as many as the node with the fewest has."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._holders = Counter[int]()  # sequences that hold a page

    @property
    def free(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free)

    def append(self, table: list[int], tokens: int) -> list[int]:
        """Append pages to `table` until it holds `tokens` tokens; returns the pages appended.

        Raises:
            PlanError: if the pool has too few free pages; `table` is unchanged then.
        """
        missing = pages_for(tokens) - len(table)
        if missing > len(self._free):
            held = (len(table) + len(self._free)) * PAGE_TOKENS
            raise PlanError(f"{tokens} tokens do not fit in the KV cache, which has room for {held}; raise -c")
        appended = [self._free.pop() for _ in range(max(missing, 0))]
        self._holders.update(appended)
        table.extend(appended)
        return appended

    def share(self, table: list[int], tokens: int) -> list[int]:
        """A table for another sequence that begins with the same `tokens` tokens: the full pages of `table` so far."""
        shared = table[: tokens // PAGE_TOKENS]
        self._holders.update(shared)
        return shared

    def truncate(self, table: list[int], tokens: int) -> None:
        """Give back the pages of `table` beyond its first `tokens` tokens.

        The last page that remains is grown into: if it is shared, and not full of these tokens, it is given back too,
        so that `table` may hold fewer tokens.
        """
        keep = pages_for(tokens)
        if tokens % PAGE_TOKENS and keep <= len(table) and self._holders[table[keep - 1]] > 1:
            keep -= 1
        gone = table[keep:]
        del table[keep:]
        for page in reversed(gone):
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                self._free.append(page)

    def release(self, table: list[int]) -> None:
        """Give all pages of `table` back and empty it."""
        self.truncate(table, 0)
