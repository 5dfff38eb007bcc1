"""Request admission: which tokens of which sequences the next step runs. (The weight scheduler is `scheduler/`.)"""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from master.generation.contents import chain
from master.generation.pages import PagePool
from master.generation.sequence import Sequence
from tpi.kernels.spec import PAGE_TOKENS

_BESIDE = 4  # answers that go on wait this many times less for a prompt's chunk
_LEAST = PAGE_TOKENS
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

    Sequences that lack one token come first, so that every answer goes on in every step. What is left is shared out
    among prompts, so that a short one is not behind a long one; beside answers they get a part of a chunk, the smaller
    the further a prompt is, so that answers wait about as long at its end as at its beginning.
    """

    def __init__(self, pages: PagePool, chunk: int, even: int = _FAR) -> None:
        """`even`: the position at which a token takes twice as long as the first one, for it attends to all before."""
        self.pages = pages
        self.chunk = chunk
        self.even = even

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
            for key in chain(sequence.tokens[: sequence.computed], sequence.keys):
                self.pages.contents.note(sequence.table[len(sequence.keys)], key)
                sequence.keys.append(key)

    def _counts(self, sequences: SequenceOf[Sequence]) -> Iterator[tuple[Sequence, int]]:
        """How many tokens of each run."""
        ready = [each for each in sequences if each.pending == 1][: self.chunk]
        yield from ((each, 1) for each in ready)
        prompts = sorted((each for each in sequences if each.pending > 1), key=lambda each: each.pending)
        room = self.chunk - len(ready)
        if ready:
            room = min(room, max(self.chunk // _BESIDE, _LEAST))
        for index, each in enumerate(prompts):
            part = -(-room // (len(prompts) - index))
            count = min(each.pending, self._sooner(each, part) if ready else part)
            room -= count
            yield each, count

    def _sooner(self, sequence: Sequence, count: int) -> int:
        """So many tokens where the sequence is now take as long as `count` at its beginning."""
        return max(min(count, _LEAST), count * self.even // (self.even + sequence.computed))

    def _work(self, sequence: Sequence, count: int) -> Work:
        self.pages.append(sequence.table, sequence.computed + count)
        kept = min(sequence.announced, len(sequence.table))
        return Work(sequence, sequence.computed, count, kept, tuple(sequence.table[kept:]))
