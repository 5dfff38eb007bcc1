"""One conversation as the engine sees it: its tokens, how many are computed, and where its keys and values are."""

from collections.abc import MutableSequence
from dataclasses import dataclass, field

from master.generation.client import Client
from master.generation.contents import Key
from master.generation.pages import PagePool
from tpi.kernels.spec import PAGE_TOKENS


@dataclass
class Sequence:
    """A growing list of token ids with its page table.

    Tokens `[0, computed)` have keys and values on every node; the rest are still to be run. `announced` counts the
    first pages of the table that the nodes know of, `keys` are those of its full pages. `reuse`: begin with pages that
    hold the same tokens already, written for the same salt; `cached` counts the tokens that were found so, the first
    time.
    """

    id: int
    tokens: MutableSequence[int]  # an array where many may wait: four bytes each
    computed: int = 0
    announced: int = 0
    table: list[int] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    reuse: bool = False
    cached: int | None = None
    client: Client = field(default_factory=Client)
    turn: int = 0  # of the batcher, when it ran last beside other clients

    @property
    def pending(self) -> int:
        """Tokens that are known but not computed yet."""
        return len(self.tokens) - self.computed

    def begin(self, pages: PagePool) -> None:
        """Take what is computed already of its tokens, if it may and has nothing yet."""
        if not self.reuse or self.table:
            return
        found = pages.find(self.tokens, self.client.salt)
        self.table, self.keys, self.computed = found.table, found.keys, found.tokens
        self.cached = found.tokens if self.cached is None else self.cached

    def truncate(self, pages: PagePool, tokens: int) -> None:
        """Forget all but the first `tokens` tokens, and what is computed of a shared page that is not full of them."""
        pages.truncate(self.table, tokens)
        del self.tokens[tokens:]
        self.computed = min(self.computed, tokens, len(self.table) * PAGE_TOKENS)
        self.announced = min(self.announced, len(self.table))
        del self.keys[self.computed // PAGE_TOKENS :]

    def leave(self, pages: PagePool) -> None:
        """Give all pages back; they are found by who has the same tokens, as long as nobody else needs them."""
        pages.truncate(self.table, self.computed)
        whole = self.computed // PAGE_TOKENS
        tail = self.tokens[whole * PAGE_TOKENS : self.computed] if len(self.table) > whole else []
        pages.release(self.table, tail, self.keys[-1] if self.keys else self.client.salt)
        self.forget()

    def forget(self) -> None:
        """Nothing of it is computed any more: the pages are another deployment's, or given back."""
        self.table, self.keys = [], []
        self.computed = self.announced = 0
