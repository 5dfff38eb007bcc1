"""Request admission: which tokens of which sequences the next step runs. (The weight scheduler is `scheduler/`.)"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import zip_longest

from master.generation.contents import chain
from master.generation.pages import PagePool
from master.generation.sequence import Sequence
from tpi.kernels.spec import PAGE_TOKENS

_BESIDE = 4  # answers that go on wait this many times less for a prompt's chunk
_LEAST = PAGE_TOKENS
_ANSWERS = 8  # of a client that go on in a step beside others; more rows than these cost a processor time in proportion
_FAR = 1 << 30
EVEN = 6
"""Times the hidden size: there a layer's attention, 4 x position x hidden operations a token, comes to what its weights
take, about 24 x hidden^2 (Kaplan et al. 2020, Scaling Laws for Neural Language Models, table 1)."""


@dataclass(frozen=True)
class Work:
    """One sequence's part of a step: run `count` tokens from `position` on.

    Of its page table as the nodes know it, the first `kept` pages stay, and `appended` follow.
    """

    sequence: Sequence
    position: int
    count: int
    kept: int
    appended: tuple[int, ...]

    @property
    def completes(self) -> bool:
        """Whether the last known token is part of this step, so that the next one can be sampled."""
        return self.position + self.count == len(self.sequence.tokens)


class Batcher:
    """Picks each step's work: at most `chunk` tokens in all.

    Sequences that lack one token come first, so that answers go on in every step; beside other clients a client has at
    most `_ANSWERS` of them, in turn. What is left is shared out among clients and among their prompts, so that a short
    one is not behind a long one. Beside answers, prompts get a part of a chunk, the smaller the further a prompt is, so
    that answers wait about as long at its end as at its beginning.
    """

    def __init__(self, pages: PagePool, chunk: int, even: int = _FAR) -> None:
        """`even`: the position at which a token takes twice as long as the first one, for it attends to all before."""
        self.pages = pages
        self.chunk = chunk
        self.even = even
        self._turn = 0  # steps in which several clients had answers

    def pick(self, sequences: SequenceOf[Sequence]) -> list[Work]:
        """The next step's work, with pages allocated for it.

        Raises:
            PlanError: if the KV pool has no room for a sequence's next tokens.
        """
        return [self._work(sequence, count) for sequence, count in self._counts(sequences) if count]

    def commit(self, work: SequenceOf[Work]) -> None:
        """Record that the step has run on every node: pages that became full can be found."""
        for item in work:
            sequence = item.sequence
            sequence.computed = item.position + item.count
            sequence.announced = len(sequence.table)
            for key in chain(sequence.tokens[: sequence.computed], sequence.keys, sequence.client.salt):
                self.pages.contents.note(sequence.table[len(sequence.keys)], key)
                sequence.keys.append(key)

    def _counts(self, sequences: SequenceOf[Sequence]) -> Iterator[tuple[Sequence, int]]:
        """Yield how many tokens of each sequence run."""
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
                count = min(each.pending, self._sooner(each, part) if ready else part)
                share, room = share - count, room - count
                yield each, count

    def _ready(self, sequences: list[Sequence]) -> list[Sequence]:
        """Choose those that run of the sequences that lack one token, those that ran longest ago first."""
        clients = _by_client(sequences)
        if len(clients) < 2:
            return sequences[: self.chunk]
        self._turn += 1
        chosen = [sorted(own, key=lambda each: each.turn)[:_ANSWERS] for own in clients]
        found = [each for turn in zip_longest(*chosen) for each in turn if each is not None][: self.chunk]
        for each in found:
            each.turn = self._turn
        return found

    def _sooner(self, sequence: Sequence, count: int) -> int:
        """So many tokens where the sequence is now take as long as `count` at its beginning."""
        return max(min(count, _LEAST), count * self.even // (self.even + sequence.computed))

    def _work(self, sequence: Sequence, count: int) -> Work:
        self.pages.append(sequence.table, sequence.computed + count)
        kept = min(sequence.announced, len(sequence.table))
        return Work(sequence, sequence.computed, count, kept, tuple(sequence.table[kept:]))


def _by_client(sequences: Iterable[Sequence]) -> list[list[Sequence]]:
    found: dict[str, list[Sequence]] = {}
    for each in sequences:
        found.setdefault(each.client.name, []).append(each)
    return list(found.values())


def _pending(sequences: SequenceOf[Sequence]) -> int:
    return sum(each.pending for each in sequences)
