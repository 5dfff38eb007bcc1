"""Which page holds which tokens: full pages by a hash of all tokens up to their end, and the last, unfinished ones.

Only what a page *holds* is known here; who holds the page is `master.generation.pages.PagePool`'s.
"""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from tpi.kernels.spec import PAGE_TOKENS

Key = bytes
"""Stands for a salt and all tokens from the first of a sequence to the end of a full page."""

BEGINNING: Key = b""
_KEY_BYTES = 16


def chain(tokens: SequenceOf[int], keys: SequenceOf[Key] = (), salt: Key = BEGINNING) -> Iterator[Key]:
    """Yield the keys of the full pages of `tokens`, beyond the first ones, whose `keys` are known already.

    All of them depend on `salt`: sequences of different salts have no key in common.
    """
    last = keys[-1] if keys else salt
    for first in range(len(keys) * PAGE_TOKENS, len(tokens) - PAGE_TOKENS + 1, PAGE_TOKENS):
        page = np.asarray(tokens[first : first + PAGE_TOKENS], "<i4").tobytes()
        last = blake2b(last + page, digest_size=_KEY_BYTES).digest()
        yield last


@dataclass(frozen=True)
class Tail:
    """An unfinished page: it holds `tokens`, fewer than a page has, which come after those of `before`."""

    page: int
    before: Key
    tokens: tuple[int, ...]


class Contents:
    """What is known of pages. A page that is written to again, or given to somebody else, is to be forgotten first."""

    def __init__(self) -> None:
        self._pages: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._tails: dict[Key, Tail] = {}  # by what is before; the latest one
        self._of_tail: dict[int, Tail] = {}

    def knows(self, page: int) -> bool:
        """Whether it could be found."""
        return page in self._keys or page in self._of_tail

    def note(self, page: int, key: Key) -> None:
        """The full page holds what `key` stands for. Where another one does already, that one is found."""
        if key not in self._pages:
            self.forget(page)
            self._pages[key], self._keys[page] = page, key

    def note_tail(self, tail: Tail) -> None:
        """Nobody goes on with this page for now. It takes the place of an earlier one after the same tokens."""
        earlier = self._tails.get(tail.before)
        if earlier is not None:
            del self._of_tail[earlier.page]
        self.forget(tail.page)
        self._tails[tail.before] = self._of_tail[tail.page] = tail

    def page(self, key: Key) -> int | None:
        """The full page of `key`."""
        return self._pages.get(key)

    def tail(self, before: Key) -> Tail | None:
        """The unfinished page after `before`."""
        return self._tails.get(before)

    def forget(self, page: int) -> None:
        """The page does not hold any more what it held."""
        if (key := self._keys.pop(page, None)) is not None:
            del self._pages[key]
        if (tail := self._of_tail.pop(page, None)) is not None:
            del self._tails[tail.before]
