"""Request admission: which tokens of which sequences the next step runs. (The weight scheduler is `scheduler/`.)"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from master.generation.pages import PagePool
from master.generation.sequence import Sequence


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
    """Picks each step's work: sequences in order of arrival, at most `chunk` tokens in all."""

    def __init__(self, pages: PagePool, chunk: int) -> None:
        self.pages = pages
        self.chunk = chunk

    def pick(self, sequences: SequenceOf[Sequence]) -> list[Work]:
        """The next step's work, with pages allocated for it.

        Raises:
            PlanError: if the KV pool has no room for a sequence's next tokens.
        """
        work, room = [], self.chunk
        for sequence in sequences:
            count = min(sequence.pending, room)
            if count == 0:
                continue
            self.pages.append(sequence.table, sequence.computed + count)
            kept = min(sequence.announced, len(sequence.table))
            appended = tuple(sequence.table[kept:])
            work.append(Work(sequence, sequence.computed, count, kept, appended))
            room -= count
        return work

    @staticmethod
    def commit(work: SequenceOf[Work]) -> None:
        """Record that the step has run on every node."""
        for item in work:
            item.sequence.computed = item.position + item.count
            item.sequence.announced = len(item.sequence.table)
