"""One conversation in the engine: its tokens, the number of computed ones, and its page table."""

from collections.abc import MutableSequence
from dataclasses import dataclass, field

from master.deployment.pages import PagePool
from master.deployment.prefixindex import Key
from master.deployment.states import StatePool
from master.generation.client import Client
from tpi.kernels.spec import PAGE_TOKENS


@dataclass
class Sequence:
    """A growing list of token ids with its page table.

    Tokens `[0, computed)` have keys and values on every node, tokens `[computed, sent)` are in steps in flight, and
    the rest are still to be run. When all are sent, the drafted tokens `ahead` may follow them, one in each further
    step. `life` grows when tokens are dropped or forgotten: results of earlier steps then do not count. The nodes know
    of the first `announced` pages of `table`; `keys` are the keys of its full pages. With `reuse`, it may begin with
    pages that have the same tokens already, written for the same salt. `cached` counts the tokens that were found in
    this way at the first attempt.
    """

    id: int
    tokens: MutableSequence[int]  # an array if many may wait: four bytes each
    computed: int = 0
    sent: int = 0
    life: int = 0
    ahead: list[int] = field(default_factory=list)
    announced: int = 0
    table: list[int] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    reuse: bool = False
    cached: int | None = None
    client: Client = field(default_factory=Client)
    turn: int = 0  # set by the batcher: number of the step in which it last ran together with other clients
    state: int | None = None  # the slot with the state of recurrent layers, from which the sequence continues
    since: int = 0  # the sequence can continue from `state` after `since` tokens, or after more of the computed ones
    writing: int | None = None  # the slot that the next step writes
    mark: Key | None = None  # the key under which the latest state of its answer is kept

    @property
    def pending(self) -> int:
        """Number of tokens that are known, but not computed or in flight yet."""
        return len(self.tokens) - self.sent

    @property
    def in_flight(self) -> bool:
        """True if a step with some of its tokens is in flight."""
        return self.sent > self.computed or bool(self.ahead)

    def drop_ahead(self) -> None:
        """Drop the drafted tokens in flight, so that the results of the sequence's steps in flight are ignored.

        The sequence's own tokens in those steps are run again if the sequence goes on.
        """
        if self.ahead:
            self.ahead.clear()
            self.sent, self.life = self.computed, self.life + 1

    def begin(self, pages: PagePool) -> None:
        """Take over cached pages that have the sequence's first tokens, if `reuse` is set and it has no pages yet."""
        if not self.reuse or self.table:
            return
        found = pages.find(self.tokens, self.client.salt)
        self.table, self.keys, self.computed = found.table, found.keys, found.tokens
        if pages.states is not None:
            self._return_to_state(pages, pages.states)
        self.sent = self.computed
        self.cached = self.computed if self.cached is None else self.cached

    def truncate(self, pages: PagePool, tokens: int) -> None:
        """Drop all but the first `tokens` tokens. A shared page that is then not full is computed again."""
        pages.truncate(self.table, tokens)
        del self.tokens[tokens:]
        behind = self.since > min(tokens, len(self.table) * PAGE_TOKENS)
        self.computed = min(self.computed, tokens, len(self.table) * PAGE_TOKENS)
        self.announced = min(self.announced, len(self.table))
        del self.keys[self.computed // PAGE_TOKENS :]
        if pages.states is not None and behind:
            self._return_to_state(pages, pages.states)
        self.sent, self.life = self.computed, self.life + 1
        self.ahead.clear()

    def advance(self, states: StatePool, since: int) -> None:
        """Take over the state that a step wrote, from which the sequence can continue after `since` tokens or more."""
        if self.state is not None and self.state != self.writing:
            states.release(self.state)
        self.state, self.writing, self.since = self.writing, None, since

    def keep_state(self, states: StatePool, answer: bool) -> None:
        """Keep the state for other sequences if they can continue from it after the last full page.

        While an `answer` is decoded, only its latest state is kept, so that a long answer leaves slots for others.
        """
        end = len(self.keys) * PAGE_TOKENS
        if self.state is None or not self.since <= end <= self.computed or not end:
            return
        if states.keep(self.state, self.keys[-1]) and answer:
            if self.mark is not None:
                states.drop(self.mark)
            self.mark = self.keys[-1]

    def _return_to_state(self, pages: PagePool, states: StatePool) -> None:
        """Go back to the latest kept state among the computed tokens, so that the tokens after it are computed
        again.
        """
        self._release_state(states)
        count, self.state = states.find(self.keys[: self.computed // PAGE_TOKENS])
        self.computed = self.since = count * PAGE_TOKENS
        pages.truncate(self.table, self.computed)
        self.announced = min(self.announced, len(self.table))
        del self.keys[count:]

    def _release_state(self, states: StatePool) -> None:
        for slot in {self.state, self.writing}:
            if slot is not None:
                states.release(slot)
        self.state = self.writing = None

    def release_pages(self, pages: PagePool) -> None:
        """Give all pages back.

        Their contents can be found by a sequence with the same tokens until the pages are reused.
        """
        if pages.states is not None:
            self._release_state(pages.states)
        pages.truncate(self.table, self.computed)
        whole = self.computed // PAGE_TOKENS
        tail = self.tokens[whole * PAGE_TOKENS : self.computed] if len(self.table) > whole else []
        pages.release(self.table, tail, self.keys[-1] if self.keys else self.client.salt)
        self.forget()

    def forget(self) -> None:
        """Mark all tokens as not computed.

        Do not give pages back, because the caller did, or their deployment has ended.
        """
        self.table, self.keys = [], []
        self.state = self.writing = self.mark = None
        self.computed = self.since = self.sent = self.announced = 0
        self.ahead.clear()
        self.life += 1
