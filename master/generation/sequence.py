"""One conversation in the engine: its tokens, how many of them are computed, and where its keys and values are."""

from collections.abc import MutableSequence
from dataclasses import dataclass, field

from master.deployment.pages import PagePool
from master.deployment.prefixindex import Key
from master.generation.client import Client
from tpi.kernels.spec import PAGE_TOKENS


@dataclass
class Sequence:
    """A growing list of token ids with its page table.

    Tokens `[0, computed)` have keys and values on every node; the rest are still to be run. The nodes know of the first
    `announced` pages of `table`; `keys` are the keys of its full pages. With `reuse`, it may begin with pages that have
    the same tokens already, written for the same salt. `cached` counts the tokens that were found in this way at the
    first attempt.
    """

    id: int
    tokens: MutableSequence[int]  # an array if many may wait: four bytes each
    computed: int = 0
    announced: int = 0
    table: list[int] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    reuse: bool = False
    cached: int | None = None
    client: Client = field(default_factory=Client)
    turn: int = 0  # set by the batcher: the turn in which it last ran next to other clients

    @property
    def pending(self) -> int:
        """Number of tokens that are known but not computed yet."""
        return len(self.tokens) - self.computed

    def begin(self, pages: PagePool) -> None:
        """Take over pages with its first tokens, if `reuse` is set and it has no pages yet."""
        if not self.reuse or self.table:
            return
        found = pages.find(self.tokens, self.client.salt)
        self.table, self.keys, self.computed = found.table, found.keys, found.tokens
        self.cached = found.tokens if self.cached is None else self.cached

    def truncate(self, pages: PagePool, tokens: int) -> None:
        """Drop all but the first `tokens` tokens. A shared page that is then not full is computed again."""
        pages.truncate(self.table, tokens)
        del self.tokens[tokens:]
        self.computed = min(self.computed, tokens, len(self.table) * PAGE_TOKENS)
        self.announced = min(self.announced, len(self.table))
        del self.keys[self.computed // PAGE_TOKENS :]

    def release_pages(self, pages: PagePool) -> None:
        """Give all pages back.

        Their contents can be found by a sequence with the same tokens until the pages are reused.
        """
        pages.truncate(self.table, self.computed)
        whole = self.computed // PAGE_TOKENS
        tail = self.tokens[whole * PAGE_TOKENS : self.computed] if len(self.table) > whole else []
        pages.release(self.table, tail, self.keys[-1] if self.keys else self.client.salt)
        self.forget()

    def forget(self) -> None:
        """Mark all tokens as not computed. Pages are not given back: they were already, or their deployment is gone."""
        self.table, self.keys = [], []
        self.computed = self.announced = 0
