"""Allocation of pages of keys and values: the master decides for every node which page holds which tokens.

A page table lists a sequence's pages in order. Pages are *appended* as the sequence grows, *found* by their contents,
*shared* with a sequence of the same beginning, and *truncated* when tokens are dropped. A page that several
sequences hold is never written to: only full pages are shared, and a sequence never grows into a shared page. The
remaining tokens of a partly matching page (at most 31) are computed again, which is faster than a copy on every node.

A page that no sequence holds stays findable until no empty page is left. Pages are then reused in the order in which
they were released.
"""

from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from master.deployment.prefixindex import BEGINNING, Key, PrefixIndex, Tail, chain
from master.deployment.states import StatePool
from tpi.errors import PlanError
from tpi.kernels.kv import pages_for
from tpi.kernels.spec import PAGE_TOKENS


@dataclass(frozen=True)
class Found:
    """The pages with the first `tokens` tokens of a prompt, and the keys of the full pages."""

    table: list[int]
    keys: list[Key]
    tokens: int


class PagePool:
    """The pages of a deployment, as many as on the node with the fewest pages, and the states of recurrent layers."""

    def __init__(self, total: int, states: StatePool | None = None) -> None:
        """Create a pool of `total` pages. `states` is None without recurrent layers."""
        self.total = total
        self.states = states
        self.contents = PrefixIndex()
        self._empty = list(range(total - 1, -1, -1))
        self._left: dict[int, None] = {}  # findable pages that no sequence holds, in the order of their release
        self._holders = Counter[int]()  # number of sequences that hold each page

    @property
    def free(self) -> int:
        """Number of pages that no sequence holds."""
        return len(self._empty) + len(self._left)

    def append(self, table: list[int], tokens: int) -> list[int]:
        """Append pages to `table` until it holds `tokens` tokens; return the pages appended.

        Raises:
            PlanError: if the pool has too few free pages; `table` is then unchanged.
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
        """Find pages that contain the beginning of `tokens`, hold them, and return them.

        The last token is always left to be computed. Pages that were written for another `salt` are not found. The last
        page may be an unfinished one that no sequence holds: the sequence that finds it continues to write in it.
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
        """Return the number of pages of `table` that no other sequence holds and that a release of `table` frees."""
        return sum(self._holders[page] == 1 for page in table)

    def share(self, table: list[int], tokens: int) -> list[int]:
        """Return a table for another sequence that begins with the same `tokens` tokens.

        The new table holds the full pages of `table`.
        """
        return [self._hold(page) for page in table[: tokens // PAGE_TOKENS]]

    def truncate(self, table: list[int], tokens: int) -> None:
        """Give back the pages of `table` beyond its first `tokens` tokens.

        The sequence grows into the last page that remains. If that page is not full and another sequence holds it too,
        give it back as well, so that `table` may hold fewer tokens than `tokens`.
        """
        keep = pages_for(tokens)
        if tokens % PAGE_TOKENS and keep <= len(table):
            if self._holders[table[keep - 1]] > 1:
                keep -= 1
            else:
                self.contents.forget(table[keep - 1])
        gone = table[keep:]
        del table[keep:]
        for page in reversed(gone):  # the start of a sequence is released last, so it stays findable longest
            self._leave(page)

    def release(self, table: list[int], tail: SequenceOf[int] = (), before: Key = BEGINNING) -> None:
        """Give all pages of `table` back and empty it.

        If the last page is not full, `tail` are its tokens and `before` is the key of the page before it, so that a
        later sequence can find the page.
        """
        if tail and table and self._holders[table[-1]] == 1:
            self.contents.note_tail(Tail(table[-1], before, tuple(tail)))
        self.truncate(table, 0)

    def _find_tail(self, found: Found, tokens: SequenceOf[int], salt: Key) -> int:
        """Take over the unfinished page that continues `found`, if there is one; return how many of `tokens` it has."""
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
    pairs = zip(one, other, strict=False)
    return next((count for count, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
