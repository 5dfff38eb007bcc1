"""One conversation as the engine sees it: its tokens, how many are computed, and where its keys and values are."""

from dataclasses import dataclass, field

from tpi.kernels.spec import PAGE_TOKENS


@dataclass
class Sequence:
    """A growing list of token ids with its page table.

    Tokens `[0, computed)` have keys and values on every node; the rest are still to be run. `announced` counts the
    first pages of the table that the nodes know of.
    """

    id: int
    tokens: list[int]
    computed: int = 0
    announced: int = 0
    table: list[int] = field(default_factory=list)

    @property
    def pending(self) -> int:
        """Tokens that are known but not computed yet."""
        return len(self.tokens) - self.computed

    def truncate(self, tokens: int) -> None:
        """Forget all but the first `tokens` tokens, after the table was truncated to what is left of them."""
        del self.tokens[tokens:]
        self.computed = min(self.computed, tokens, len(self.table) * PAGE_TOKENS)
        self.announced = min(self.announced, len(self.table))

    def forget(self) -> None:
        """Nothing of it is computed any more: the pages were another deployment's."""
        self.table = []
        self.computed = self.announced = 0
