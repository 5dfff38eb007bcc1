"""The prefix cache's index: full pages by a hash of all tokens up to their end, and unfinished last pages.

This module knows only what each page contains; `master.deployment.pages.PagePool` knows which sequences hold it.
"""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from tpi.kernels.spec import PAGE_TOKENS

Key = bytes
"""A hash that stands for a salt and all tokens from the start of a sequence to the end of a full page."""

BEGINNING: Key = b""
_KEY_BYTES = 16


def chain(tokens: SequenceOf[int], keys: SequenceOf[Key] = (), salt: Key = BEGINNING) -> Iterator[Key]:
    """Yield the keys of the full pages of `tokens`, without those of the first pages, which are given as `keys`.

    Every key depends on `salt`: sequences with different salts have no key in common.
    """
    last = keys[-1] if keys else salt
    for first in range(len(keys) * PAGE_TOKENS, len(tokens) - PAGE_TOKENS + 1, PAGE_TOKENS):
        page = np.asarray(tokens[first : first + PAGE_TOKENS], "<i4").tobytes()
        last = blake2b(last + page, digest_size=_KEY_BYTES).digest()
        yield last


@dataclass(frozen=True)
class Tail:
    """A page that `tokens` fill only in part. The tokens before the page have the key `before`."""

    page: int
    before: Key
    tokens: tuple[int, ...]


class PrefixIndex:
    """The index of page contents. A page must be forgotten before it is rewritten or given to another sequence."""

    def __init__(self) -> None:
        self._pages: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._tails: dict[Key, Tail] = {}  # the latest unfinished page after each key
        self._of_tail: dict[int, Tail] = {}

    def knows(self, page: int) -> bool:
        """Return True if lookups can return `page`."""
        return page in self._keys or page in self._of_tail

    def note(self, page: int, key: Key) -> None:
        """Record that the full page `page` contains the tokens of `key`.

        If a page with the same tokens is known already, do nothing.
        """
        if key not in self._pages:
            self.forget(page)
            self._pages[key], self._keys[page] = page, key

    def note_tail(self, tail: Tail) -> None:
        """Record an unfinished page that no sequence extends at present.

        It replaces an earlier unfinished page after the same tokens.
        """
        earlier = self._tails.get(tail.before)
        if earlier is not None:
            del self._of_tail[earlier.page]
        self.forget(tail.page)
        self._tails[tail.before] = self._of_tail[tail.page] = tail

    def page(self, key: Key) -> int | None:
        """Return the full page of `key`, or None."""
        return self._pages.get(key)

    def tail(self, before: Key) -> Tail | None:
        """Return the unfinished page after `before`, or None."""
        return self._tails.get(before)

    def forget(self, page: int) -> None:
        """Remove a page from the index, as its contents are about to change."""
        if (key := self._keys.pop(page, None)) is not None:
            del self._pages[key]
        if (tail := self._of_tail.pop(page, None)) is not None:
            del self._tails[tail.before]
