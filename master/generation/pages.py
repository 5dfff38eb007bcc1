"""Allocation of pages of keys and values: the master decides for every node which page holds which tokens.

A page table lists a sequence's pages in order. Pages are *appended* as the sequence grows, *found* by what they hold,
*shared* with another sequence that begins alike, and *truncated* when tokens are taken back. A page that several
sequences hold is never written to: only full pages are shared, and a shared one is never the last to grow into. What
is not shared of a page (at most 31 tokens) is computed again, which is sooner done than a copy on every node.

A page that nobody holds any more stays as long as there is another one to give: the one that was left first goes first.
"""

from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from master.generation.contents import BEGINNING, Contents, Key, Tail, chain
from tpi.errors import PlanError
from tpi.kernels.spec import PAGE_TOKENS
from tpi.kv import pages_for


@dataclass(frozen=True)
class Found:
    """Pages that hold the first `tokens` tokens of a prompt, with the keys of the full ones."""

    table: list[int]
    keys: list[Key]
    tokens: int


class PagePool:
    """A deployment's pages; there are as many as the node with the fewest has."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.contents = Contents()
        self._empty = list(range(total - 1, -1, -1))
        self._left: dict[int, None] = {}  # pages that could be found and that nobody holds, in order of leaving
        self._holders = Counter[int]()  # sequences that hold a page

    @property
    def free(self) -> int:
        """Pages that no sequence holds."""
        return len(self._empty) + len(self._left)

    def append(self, table: list[int], tokens: int) -> list[int]:
        """Append pages to `table` until it holds `tokens` tokens; returns the pages appended.

        Raises:
            PlanError: if the pool has too few free pages; `table` is unchanged then.
        """
        missing = pages_for(tokens) - len(table)
        if missing > self.free:
            held = (len(table) + self.free) * PAGE_TOKENS
            raise PlanError(f"{tokens} tokens do not fit in the KV cache, which has room for {held}; raise -c")
        appended = [self._take() for _ in range(max(missing, 0))]
        self._holders.update(appended)
        table.extend(appended)
        return appended

    def find(self, tokens: SequenceOf[int], salt: Key = BEGINNING) -> Found:
        """Return pages that hold the beginning of `tokens`, and hold them; the last token is never found.

        Pages that were written for another `salt` are not found.

        The last of these pages may be an unfinished one that nobody holds: whoever finds it writes on in it.
        """
        found = Found([], [], 0)
        for key in chain(tokens[:-1], salt=salt):
            page = self.contents.page(key)
            if page is None:
                break
            found.table.append(self._hold(page))
            found.keys.append(key)
        whole = len(found.table) * PAGE_TOKENS
        return Found(found.table, found.keys, whole + self._find_tail(found, tokens[whole:-1], salt))

    def own(self, table: SequenceOf[int]) -> int:
        """Return how many pages of `table` no other sequence holds: its release makes so many free."""
        return sum(self._holders[page] == 1 for page in table)

    def share(self, table: list[int], tokens: int) -> list[int]:
        """A table for another sequence that begins with the same `tokens` tokens: the full pages of `table` so far."""
        return [self._hold(page) for page in table[: tokens // PAGE_TOKENS]]

    def truncate(self, table: list[int], tokens: int) -> None:
        """Give back the pages of `table` beyond its first `tokens` tokens.

        The last page that remains is grown into: if it is shared, and not full of these tokens, it is given back too,
        so that `table` may hold fewer tokens.
        """
        keep = pages_for(tokens)
        if tokens % PAGE_TOKENS and keep <= len(table):
            if self._holders[table[keep - 1]] > 1:
                keep -= 1
            else:
                self.contents.forget(table[keep - 1])
        gone = table[keep:]
        del table[keep:]
        for page in reversed(gone):  # so that the beginning of what can be found goes last
            self._leave(page)

    def release(self, table: list[int], tail: SequenceOf[int] = (), before: Key = BEGINNING) -> None:
        """Give all pages of `table` back and empty it; the last one holds `tail`, if anything, after `before`."""
        if tail and table and self._holders[table[-1]] == 1:
            self.contents.note_tail(Tail(table[-1], before, tuple(tail)))
        self.truncate(table, 0)

    def _find_tail(self, found: Found, tokens: SequenceOf[int], salt: Key) -> int:
        """How many of `tokens` an unfinished page holds, which becomes the last of `found`. Nobody held it so far."""
        tail = self.contents.tail(found.keys[-1] if found.keys else salt)
        alike = _alike(tail.tokens, tokens) if tail else 0
        if tail is None or not alike:
            return 0
        found.table.append(self._hold(tail.page))
        self.contents.forget(tail.page)
        return alike

    def _hold(self, page: int) -> int:
        self._left.pop(page, None)
        self._holders[page] += 1
        return page

    def _take(self) -> int:
        if self._empty:
            return self._empty.pop()
        page = next(iter(self._left))
        del self._left[page]
        self.contents.forget(page)
        return page

    def _leave(self, page: int) -> None:
        self._holders[page] -= 1
        if not self._holders[page]:
            del self._holders[page]
            if self.contents.knows(page):
                self._left[page] = None
            else:
                self._empty.append(page)


def _alike(one: SequenceOf[int], other: SequenceOf[int]) -> int:
    """How many tokens are the same from the beginning."""
    pairs = zip(one, other, strict=False)
    return next((count for count, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
