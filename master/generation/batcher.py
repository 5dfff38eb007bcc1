"""The batcher: it chooses the sequences and tokens of the next step. (`scheduler/` schedules weights.)"""

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from itertools import zip_longest
from types import MappingProxyType
from typing import Protocol

from master.deployment.pages import PagePool
from master.deployment.prefixindex import chain
from master.deployment.states import StatePool
from master.generation.sequence import Sequence
from tpi.kernels.spec import PAGE_TOKENS, STREAM_TOKENS


class Draft(Protocol):
    """A draft of a sequence's next tokens (`master.generation.speculation.drafts.Draft`)."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The ids of the drafted tokens."""


Drafts = Mapping[int, Draft]
NO_DRAFTS: Drafts = MappingProxyType({})

_BESIDE = 4  # while answers are decoded, a step has at most 1/4 of a chunk of prompt tokens, so that answers wait less
_LEAST = PAGE_TOKENS
_ANSWERS = 8  # limit of one client's answers in a step if other clients decode, too; each row costs processor time
_FAR = 1 << 30
EVEN = 6
"""Position, in multiples of the hidden size, at which a layer's attention costs as much as its weights.

Attention takes 4 x position x hidden operations a token, the weights about 24 x hidden^2 (Kaplan et al. 2020, Scaling
Laws for Neural Language Models, table 1).
"""


@dataclass(frozen=True)
class Work:
    """One sequence's part of a step: run `count` tokens from `position` on, the last of which may be `drafted`.

    A step that runs ahead of its sequence has one token, the drafted token `guess`. Its result counts only if earlier
    steps yield that very token. Otherwise the sequence's `life` has changed when the result comes.

    The nodes keep the first `kept` pages of its page table and append the pages `appended`. In models with recurrent
    layers, the sequence continues from the state in the slot `read` (None: from the beginning) and writes `write`.
    """

    sequence: Sequence
    position: int
    count: int
    kept: int
    appended: tuple[int, ...]
    read: int | None = None
    write: int | None = None
    drafted: tuple[int, ...] = ()
    life: int = 0  # of the sequence when the step was started
    guess: int | None = None

    @property
    def counts(self) -> bool:
        """True if the sequence has not dropped this part's tokens since the step was started."""
        return self.life == self.sequence.life

    @property
    def known(self) -> int:
        """Number of this part's tokens that are not drafted."""
        return self.count - len(self.drafted)

    @property
    def completes(self) -> bool:
        """True if the last known token is part of this step, so that the next one can be sampled."""
        return self.counts and self.position + self.known == len(self.sequence.tokens)

    @property
    def tokens(self) -> list[int]:
        """The ids of this part's tokens."""
        if self.guess is not None:
            return [self.guess]
        return [*self.sequence.tokens[self.position : self.position + self.known], *self.drafted]


class Batcher:
    """Scheduler of each step's work: at most `chunk` tokens in all.

    Sequences that decode (one token each) come first, so that answers continue in every step. If several clients have
    such sequences, each gets at most `_ANSWERS` of them a step, in turn. The remaining room is divided among clients
    and among their prompts, so that a short prompt does not wait for a long one. While answers are decoded, prompts get
    only part of a chunk. The part shrinks as a prompt grows longer, so that each step takes about the same time.
    """

    def __init__(self, pages: PagePool, chunk: int, even: int = _FAR) -> None:
        """Create a batcher of steps of at most `chunk` tokens, which takes pages from `pages`.

        A token at position `even` takes twice as long as one at 0, because it attends to all earlier tokens.
        """
        self.pages = pages
        self.chunk = chunk
        self.even = even
        self._turn = 0  # number of steps in which several clients had answers to continue

    def pick(self, sequences: SequenceOf[Sequence], drafts: Drafts = NO_DRAFTS) -> list[Work]:
        """Return the next step's work, with pages allocated for it.

        `drafts` are tokens that may follow a sequence, by its id. A draft takes a page only if one is left for each
        sequence's next step.

        Raises:
            PlanError: if the KV cache has no room for a sequence's next tokens.
        """
        work = [self._work(sequence, count) for sequence, count in self._counts(sequences) if count]
        return [self._with_draft(item, drafts, len(sequences)) if item.sequence.id in drafts else item for item in work]

    def has_room_ahead(self, sequence: Sequence, needed: int) -> bool:
        """Return True if there is room for one more token after all tokens of `sequence` that are in flight.

        The token may go into the sequence's last page, or into a new page if `needed` pages are then still free.
        """
        position = sequence.sent + len(sequence.ahead)
        return position < PAGE_TOKENS * len(sequence.table) or self.pages.free > needed

    def ahead(self, sequence: Sequence, token: int) -> Work:
        """Return work that runs the drafted `token` after all tokens of `sequence` in flight."""
        position = sequence.sent + len(sequence.ahead)
        self.pages.append(sequence.table, position + 1)
        kept = min(sequence.announced, len(sequence.table))
        return Work(sequence, position, 1, kept, tuple(sequence.table[kept:]), life=sequence.life, guess=token)

    def start(self, work: SequenceOf[Work]) -> None:
        """Record that the step has been sent to every node: the nodes know the pages, and the tokens are in flight."""
        for item in work:
            item.sequence.announced = len(item.sequence.table)
            if item.guess is None:
                item.sequence.sent = item.position + item.known
            else:
                item.sequence.ahead.append(item.guess)

    def commit(self, work: SequenceOf[Work]) -> None:
        """Record that the step has run on every node: full pages can now be found by their contents."""
        short = sum(item.count for item in work) <= STREAM_TOKENS
        for item in work:
            if not item.counts:
                continue
            if self.pages.states is not None:  # in a short step, all tokens but the first can be dropped again
                item.sequence.advance(self.pages.states, item.position + (1 if short else item.count))
            self._computed(item, item.position + item.known)

    def accept(self, item: Work, right: int) -> None:
        """Record that the first `right` drafted tokens of `item` were computed and belong to the sequence now.

        The sampler has drawn a further token after them. If it is the sequence's first drafted token in flight
        (`ahead`), the later steps in flight still count. Otherwise their results are ignored.
        """
        sequence = item.sequence
        if right:
            self._computed(item, item.position + item.known + right)
            sequence.sent = sequence.computed
        if sequence.ahead and sequence.pending and sequence.tokens[sequence.sent] == sequence.ahead[0]:
            sequence.sent += 1
            del sequence.ahead[0]
        else:
            sequence.drop_ahead()

    def _computed(self, item: Work, tokens: int) -> None:
        """Record that the first `tokens` tokens of the item's sequence are computed."""
        sequence = item.sequence
        sequence.computed = tokens
        for key in chain(sequence.tokens[:tokens], sequence.keys, sequence.client.salt):
            self.pages.contents.note(sequence.table[len(sequence.keys)], key)
            sequence.keys.append(key)
        if self.pages.states is not None:
            sequence.keep_state(self.pages.states, item.known == 1)

    def _with_draft(self, item: Work, drafts: Drafts, needed: int) -> Work:
        """Return `item` with as much of its draft as fits into the pages, of which `needed` must stay free."""
        table, end = item.sequence.table, item.position + item.count
        room = PAGE_TOKENS * (len(table) + max(0, self.pages.free - needed)) - end
        draft = drafts[item.sequence.id].tokens[:room]
        more = tuple(self.pages.append(table, end + len(draft)))
        return replace(item, count=item.count + len(draft), appended=item.appended + more, drafted=draft)

    def _counts(self, sequences: SequenceOf[Sequence]) -> Iterator[tuple[Sequence, int]]:
        """Yield each sequence that runs in the next step, with the number of its tokens in the step."""
        ready = self._ready([each for each in sequences if each.pending == 1])
        yield from ((each, 1) for each in ready)
        clients = sorted(_by_client(each for each in sequences if each.pending > 1), key=_pending)
        room = self.chunk - len(ready)
        if ready:
            room = min(room, max(self.chunk // _BESIDE, _LEAST))
        for index, prompts in enumerate(clients):
            share = -(-room // (len(clients) - index))
            for number, each in enumerate(sorted(prompts, key=lambda each: each.pending)):
                part = -(-share // (len(prompts) - number))
                count = min(each.pending, self._in_time(each, part) if ready else part)
                if self.pages.states is not None:
                    count = self._up_to_page(each, count)
                share, room = share - count, room - count
                yield each, count

    def _up_to_page(self, sequence: Sequence, count: int) -> int:
        """Return `count`, reduced so that this step's part of the prompt ends at the end of a page, where a state can
        be kept.

        Return `count` unchanged if the part contains no end of a page, or reaches the end of the prompt.
        """
        end = (sequence.sent + count) // PAGE_TOKENS * PAGE_TOKENS
        return end - sequence.sent if end > sequence.sent and count < sequence.pending else count

    def _ready(self, sequences: list[Sequence]) -> list[Sequence]:
        """Choose the sequences for a step among `sequences`, each of which has one token to run.

        If they are of several clients, alternate between the clients; of each, those that ran longest ago come first.
        """
        clients = _by_client(sequences)
        if len(clients) < 2:
            return sequences[: self.chunk]
        self._turn += 1
        chosen = [sorted(own, key=lambda each: each.turn)[:_ANSWERS] for own in clients]
        found = [each for turn in zip_longest(*chosen) for each in turn if each is not None][: self.chunk]
        for each in found:
            each.turn = self._turn
        return found

    def _in_time(self, sequence: Sequence, count: int) -> int:
        """Return how many of the sequence's next tokens can be computed in the time of `count` tokens at position 0.

        Return at least `_LEAST`, or `count` if that is less.
        """
        return max(min(count, _LEAST), count * self.even // (self.even + sequence.sent))

    def _work(self, sequence: Sequence, count: int) -> Work:
        self.pages.append(sequence.table, sequence.sent + count)
        kept = min(sequence.announced, len(sequence.table))
        if self.pages.states is not None:
            self._choose_state(sequence, self.pages.states)
        appended = tuple(sequence.table[kept:])
        states = (sequence.state, sequence.writing)
        return Work(sequence, sequence.sent, count, kept, appended, *states, life=sequence.life)

    def _choose_state(self, sequence: Sequence, states: StatePool) -> None:
        """Choose the slot that the step writes: the slot that it reads, unless another sequence may read it, too."""
        if sequence.writing is None:
            own = sequence.state is not None and states.writable(sequence.state)
            sequence.writing = sequence.state if own else states.take()


def _by_client(sequences: Iterable[Sequence]) -> list[list[Sequence]]:
    found: dict[str, list[Sequence]] = {}
    for each in sequences:
        found.setdefault(each.client.name, []).append(each)
    return list(found.values())


def _pending(sequences: SequenceOf[Sequence]) -> int:
    return sum(each.pending for each in sequences)
