"""The step loop: from requests to tokens. A step runs on every node of the deployment; what is complete is sampled."""

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from itertools import accumulate, count
from time import perf_counter

import numpy as np
import numpy.typing as npt

from master.deployment.deployment import Deployment
from master.generation.batcher import Batcher, Work
from master.generation.request import Request, Sampled
from master.generation.sampler import Sampler
from master.generation.sequence import Sequence
from tpi.errors import UsageError
from tpi.finite import require_finite
from tpi.net.messages import StepEntry

F32 = npt.NDArray[np.float32]


class Engine:
    """Runs requests on a deployment, which can be replaced between two steps: sequences live as long as wanted."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.requests: list[Request] = []  # in order of arrival
        self._batcher = Batcher(deployment.pages, deployment.limits.chunk)
        self._sequences: dict[int, Sequence] = {}
        self._ids = count()
        self._released: list[int] = []

    @property
    def context(self) -> int:
        """The most tokens of a sequence."""
        return self.deployment.limits.context

    def replace(self, deployment: Deployment) -> None:
        """Go on with another deployment. Pages are filled again by computing the tokens that sequences have so far."""
        self.deployment = deployment
        self._batcher = Batcher(deployment.pages, deployment.limits.chunk)
        self._released.clear()
        for sequence in self._sequences.values():
            sequence.forget()

    def admit(self, tokens: SequenceOf[int]) -> Sequence:
        """A new sequence that begins with the prompt `tokens`; it is the engine's until `release`.

        Raises:
            UsageError: if the prompt is empty or leaves no room in the context.
        """
        sequence = Sequence(next(self._ids), [])
        self.extend(sequence, tokens)
        self._sequences[sequence.id] = sequence
        return sequence

    def extend(self, sequence: Sequence, tokens: SequenceOf[int]) -> None:
        """Append prompt tokens (a further turn) to a sequence; raises UsageError as `admit`."""
        length = len(sequence.tokens) + len(tokens)
        if not tokens:
            raise UsageError("the prompt is empty; give some text with -p")
        if length >= self.context:
            ended = self.context >= self.deployment.vocabulary.config.context
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
        self.deployment.pages.truncate(sequence.table, shared)
        sequence.truncate(shared)
        self.extend(sequence, tokens[shared:])
        return sequence

    def submit(self, request: Request) -> None:
        """Answer `request` in the steps to come, beside all others; it leaves when it is finished or withdrawn."""
        if request.limit > 0 and len(request.sequence.tokens) < self.context:
            self.requests.append(request)
        else:
            request.finished = True

    def withdraw(self, request: Request) -> None:
        """Give a request up, wherever it is; its sequence keeps what it has."""
        if request in self.requests:
            self.requests.remove(request)

    def step(self) -> None:
        """Run one step of all requests; each that is complete gets a token.

        Raises:
            NodeLost, NodeError: if a worker is lost or fails; requests stay as they were before the step.
            PlanError: if there are too few pages for a sequence's next tokens.
        """
        work = self._batcher.pick([request.sequence for request in self.requests])
        rows = self._forward(work)
        if complete := [item for item in work if item.completes]:
            logits = self.deployment.vocabulary.head(rows if len(rows) == len(complete) else rows[_last_rows(work)])
            self._push({item.sequence.id: row for item, row in zip(complete, logits, strict=True)})

    def generate(
        self, sequence: Sequence, sampler: Sampler, limit: int, stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[Sampled]:
        """Tokens of one sequence as they are sampled, at most `limit`.

        Ends early where the context is full, or where `stopped`, which is asked before every step, says so.
        """
        made = deque[Sampled]()

        def sink(sampled: Sampled) -> bool:
            made.append(sampled)
            return True

        request = Request(sequence, sampler, limit, sink)
        self.submit(request)
        try:
            while not request.finished and not stopped():
                self.step()
                while made:
                    yield made.popleft()
        finally:
            self.withdraw(request)

    def logits(self, tokens: SequenceOf[int]) -> F32:
        """`[len(tokens), vocab]`: the logits after each of `tokens`, computed as one new sequence (for evaluation)."""
        sequence = self.admit(tokens)
        rows = []
        while sequence.pending:
            rows.append(self.deployment.vocabulary.head(self._forward(self._batcher.pick([sequence]))))
        self.release(sequence)
        return np.concatenate(rows)

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence, and give its pages back on every node."""
        self.deployment.pages.release(sequence.table)
        self._sequences.pop(sequence.id, None)
        self._released.append(sequence.id)

    def _forward(self, work: SequenceOf[Work]) -> F32:
        """Hidden states `[tokens, hidden]` after the last block for the tokens of `work`, in its order."""
        tokens = [token for item in work for token in item.sequence.tokens[item.position :][: item.count]]
        positions = [position for item in work for position in range(item.position, item.position + item.count)]
        entries = tuple(
            StepEntry(item.sequence.id, item.position, item.count, item.kept, item.appended) for item in work
        )
        released, self._released = tuple(self._released), []
        x = self.deployment.vocabulary.embedding(tokens, positions)
        require_finite(x, "a row of the embedding", "the model is damaged; make the pack again from its source")
        hidden = self.deployment.forward(entries, released, x)
        require_finite(hidden, "the sum after the last block")
        self._batcher.commit(work)
        return hidden

    def _push(self, logits: dict[int, F32]) -> None:
        """A token for every request whose sequence has logits, by the sequence's number."""
        for request in list(self.requests):
            sequence = request.sequence
            if (row := logits.get(sequence.id)) is not None:
                token = request.sampler.sample(row, sequence.tokens)
                sequence.tokens.append(token)
                request.push(Sampled(sequence, token, perf_counter()), self.context)
        self.requests = [request for request in self.requests if not request.finished]


def _last_rows(work: SequenceOf[Work]) -> list[int]:
    """Where the last token of each sequence that is complete stands in its step."""
    ends = accumulate(item.count for item in work)
    return [end - 1 for item, end in zip(work, ends, strict=True) if item.completes]
