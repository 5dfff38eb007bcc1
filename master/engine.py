"""The step loop: from sequences to tokens. A step runs on every node; what is complete is sampled."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import accumulate, count
from time import perf_counter
from typing import Protocol

import numpy as np
import numpy.typing as npt

from master.batcher import Batcher, Work
from master.sampler import Sampler
from master.sequence import Sequence
from master.vocabulary import Embedding, Head
from tpi.errors import UsageError
from tpi.finite import require_finite
from tpi.messages import Step, StepEntry
from worker.node.node import Node

F32 = npt.NDArray[np.float32]


class Workers(Protocol):
    """The other nodes, as the engine needs them; `master.cluster` has the real one, `Alone` the empty one."""

    def step(self, step: Step) -> None:
        """Start a step on every worker."""


@dataclass(frozen=True)
class Fence:
    """What every message of this run carries: a random 64-bit `session`, and the `epoch` of the plan in force."""

    session: int
    epoch: int


@dataclass(frozen=True)
class Sampled:
    """A new token of a sequence, and when its step ended (`perf_counter` seconds)."""

    sequence: Sequence
    token: int
    at: float


class Engine:
    """Runs sequences on the group of nodes; the master's own node computes in this process as rank 0."""

    def __init__(
        self,
        embedding: Embedding,
        head: Head,
        node: Node,
        workers: Workers,
        batcher: Batcher,
        context: int,
        fence: Fence,
        longest: int | None = None,
    ) -> None:
        """`context` is the most tokens of a sequence, `longest` the most that the model was made for."""
        self.context = context
        self._longest = longest
        self._fence = fence
        self._embedding = embedding
        self._head = head
        self._node = node
        self._workers = workers
        self._batcher = batcher
        self._steps = count(1)  # step 0 is the one in which the group settles
        self._ids = count()
        self._released: list[int] = []

    def admit(self, tokens: SequenceOf[int]) -> Sequence:
        """A new sequence that begins with the prompt `tokens`.

        Raises:
            UsageError: if the prompt is empty or leaves no room in the context.
        """
        sequence = Sequence(next(self._ids), [])
        self.extend(sequence, tokens)
        return sequence

    def extend(self, sequence: Sequence, tokens: SequenceOf[int]) -> None:
        """Append prompt tokens (a further turn) to a sequence; raises UsageError as `admit`."""
        length = len(sequence.tokens) + len(tokens)
        if not tokens:
            raise UsageError("the prompt is empty; give some text with -p")
        if length >= self.context:
            ended = self._longest is not None and self.context >= self._longest
            out = ", all that this model was made for; shorten it" if ended else "; shorten it or raise -c"
            raise UsageError(f"the prompt takes {length} tokens, over the context of {self.context}{out}")
        sequence.tokens.extend(tokens)

    def resume(self, sequence: Sequence | None, tokens: SequenceOf[int]) -> Sequence:
        """A sequence of `tokens` that keeps what an earlier one has computed of them; the earlier one is used up.

        Raises:
            UsageError: as `admit`.
        """
        if sequence is None:
            return self.admit(tokens)
        shared = 0
        for known, wanted in zip(sequence.tokens[: sequence.computed], tokens[:-1], strict=False):
            if known != wanted:
                break
            shared += 1
        self._batcher.pages.truncate(sequence.table, shared)
        sequence.truncate(shared)
        self.extend(sequence, tokens[shared:])
        return sequence

    def step(self, sequences: SequenceOf[Sequence], samplers: Callable[[Sequence], Sampler]) -> list[Sampled]:
        """Run one step over `sequences` and append a sampled token to each that is complete."""
        work = self._batcher.pick(sequences)
        rows = self.forward(work)
        complete = [item for item in work if item.completes]
        if not complete:
            return []
        logits = self._head(rows if len(rows) == len(complete) else rows[_last_rows(work)])
        return [self._sample(item.sequence, row, samplers) for item, row in zip(complete, logits, strict=True)]

    def forward(self, work: SequenceOf[Work]) -> F32:
        """Hidden states `[tokens, hidden]` after the last block for the tokens of `work`, in its order."""
        tokens = [token for item in work for token in item.sequence.tokens[item.position :][: item.count]]
        positions = [position for item in work for position in range(item.position, item.position + item.count)]
        x = self._embedding(tokens, positions)
        require_finite(x, "a row of the embedding", "the model is damaged; make the pack again from its source")
        step = self._message(work, x)
        self._workers.step(step)
        hidden = self._node.run(step)
        assert hidden is not None  # rank 0 always gets the last sum
        require_finite(hidden, "the sum after the last block")
        self._batcher.commit(work)
        return hidden

    def logits(self, tokens: SequenceOf[int]) -> F32:
        """`[len(tokens), vocab]`: the logits after each of `tokens`, computed as one new sequence (for evaluation)."""
        sequence = self.admit(tokens)
        rows = []
        while sequence.pending:
            rows.append(self._head(self.forward(self._batcher.pick([sequence]))))
        self.release(sequence)
        return np.concatenate(rows)

    def generate(
        self, sequence: Sequence, sampler: Sampler, limit: int, stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[Sampled]:
        """Tokens of one sequence as they are sampled, at most `limit`.

        Ends early where the context is full, or where `stopped`, which is asked before every step, says so.
        """
        for _ in range(min(limit, self.context - len(sequence.tokens))):
            sampled: list[Sampled] = []
            while not sampled:
                if stopped():
                    return
                sampled = self.step([sequence], lambda _: sampler)
            yield sampled[0]

    def release(self, sequence: Sequence) -> None:
        """Give the sequence's pages back on every node."""
        self._batcher.pages.release(sequence.table)
        self._released.append(sequence.id)

    def _message(self, work: SequenceOf[Work], x: F32) -> Step:
        sequences = tuple(
            StepEntry(item.sequence.id, item.position, item.count, item.kept, item.appended) for item in work
        )
        released, self._released = tuple(self._released), []
        return Step(self._fence.session, self._fence.epoch, next(self._steps), sequences, released, x)

    @staticmethod
    def _sample(sequence: Sequence, logits: F32, samplers: Callable[[Sequence], Sampler]) -> Sampled:
        token = samplers(sequence).sample(logits, sequence.tokens)
        sequence.tokens.append(token)
        return Sampled(sequence, token, perf_counter())


def _last_rows(work: SequenceOf[Work]) -> list[int]:
    """Where the last token of each sequence that is complete stands in its step."""
    ends = accumulate(item.count for item in work)
    return [end - 1 for item, end in zip(work, ends, strict=True) if item.completes]
