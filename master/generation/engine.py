"""The step loop: from requests to tokens. A step runs on every node; complete sequences then get their next token."""

from array import array
from collections.abc import Sequence as SequenceOf
from itertools import accumulate, count
from time import perf_counter

import numpy as np
import numpy.typing as npt

from master.deployment.deployment import Deployment
from master.generation.admission import Admission
from master.generation.batcher import EVEN, Batcher, Work
from master.generation.client import Client
from master.generation.request import Request
from master.generation.sequence import Sequence
from master.generation.speculation.speculation import Speculation
from tpi.errors import UsageError
from tpi.finite import require_finite
from tpi.net.messages import StepEntry

F32 = npt.NDArray[np.float32]

MOST_RUNNING = 64  # requests at once; more of them would only make each slower


class Engine:
    """Runs requests on a deployment, which can be replaced between two steps without losing any sequence.

    Requests join and leave at every step: `master.generation.admission.Admission` decides which ones run.
    `master.generation.thread.EngineThread` runs the steps.
    """

    def __init__(self, deployment: Deployment, most: int = MOST_RUNNING) -> None:
        """Create an engine in which at most `most` requests run at once."""
        self.admission = Admission(most)
        self.speculation, self.drafts = Speculation(), True
        self._sequences: dict[int, Sequence] = {}
        self._ids = count()
        self._deploy(deployment)

    @property
    def context(self) -> int:
        """The most tokens that a sequence may have."""
        return self.deployment.limits.context

    @property
    def requests(self) -> list[Request]:
        """All unfinished requests: first those that run, then those that wait."""
        return [*self.admission.running, *self.admission.waiting]

    def replace(self, deployment: Deployment) -> None:
        """Switch to another deployment. The KV cache of every sequence is computed again from its tokens."""
        for sequence in self._sequences.values():
            sequence.forget()
        self._deploy(deployment)

    def admit(self, tokens: SequenceOf[int], reuse: bool = False, client: Client | None = None) -> Sequence:
        """Return a new sequence that begins with the prompt `tokens`. The engine keeps it until `release`.

        With `reuse`, keys and values that sequences of the same salt have computed for the same tokens are reused.

        Raises:
            UsageError: if the prompt is empty or leaves no room in the context.
        """
        sequence = Sequence(next(self._ids), array("i"), reuse=reuse, client=client or Client())
        self.extend(sequence, tokens)
        self._sequences[sequence.id] = sequence
        return sequence

    def extend(self, sequence: Sequence, tokens: SequenceOf[int]) -> None:
        """Append prompt tokens (a further turn) to a sequence.

        Raises:
            UsageError: if there are no tokens, or they leave no room in the context.
        """
        length = len(sequence.tokens) + len(tokens)
        if not tokens:
            raise UsageError("the prompt is empty; give some text with -p")
        if length >= self.context:
            ended = self.context >= self.deployment.vocabulary.config.context
            out = ", all that this model was made for; shorten it" if ended else "; shorten it or raise -c"
            raise UsageError(f"the prompt takes {length} tokens, over the context of {self.context}{out}")
        sequence.tokens.extend(tokens)

    def submit(self, request: Request) -> None:
        """Queue `request` for the coming steps. It leaves when it is finished or withdrawn."""
        if request.limit > 0 and len(request.sequence.tokens) < self.context:
            self.admission.waiting.push(request)
        else:
            request.finished = True

    def withdraw(self, request: Request) -> None:
        """Cancel a request, running or waiting. Its sequence keeps its tokens and pages."""
        request.finished = True
        self.admission.withdraw(request)

    def step(self) -> None:
        """Run one step of all requests. Each request whose known tokens are all computed gets its next token.

        Raises:
            NodeLost, NodeError: if a worker is lost or fails. Requests stay as they were before the step.
            PlanError: if there are too few pages for the next tokens of a single sequence.
        """
        self.admission.admit(perf_counter())
        self.admission.make_room()
        running = self.admission.running
        if not running:
            return
        began = perf_counter()
        drafts = self.speculation.choose(running, self.context) if self.drafts and self.deployment.drafts else {}
        work = self._batcher.pick([request.sequence for request in running], drafts)
        rows = self._forward(work)
        for request in running:
            if request.rows is not None:
                self._deliver_rows(request, work, rows)
        right = self._draw(work, rows)
        self.speculation.learn(work, drafts, right, perf_counter() - began)
        for request in running:
            if request.finished:
                self.speculation.keep(request)
        self.admission.running = [request for request in running if not request.finished]

    def logits(self, tokens: SequenceOf[int]) -> F32:
        """Return the logits after each of `tokens`, `[len(tokens), vocab]`, computed as one new sequence."""
        sequence = self.admit(tokens)  # without reuse, so that every row is computed
        rows = []
        while sequence.pending:
            rows.append(self.deployment.vocabulary.head(self._forward(self._batcher.pick([sequence]))))
        self.release(sequence)
        return np.concatenate(rows)

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence and give its pages back. Their contents can be found until they are reused."""
        self.admission.give_back(sequence)
        self._sequences.pop(sequence.id, None)

    def _deploy(self, deployment: Deployment) -> None:
        self.deployment = deployment
        even = EVEN * deployment.vocabulary.config.hidden
        self.speculation.forget_times()
        self._batcher = Batcher(deployment.pages, deployment.limits.chunk, even)
        self.admission.deploy(deployment)

    def _forward(self, work: SequenceOf[Work]) -> F32:
        """Return hidden states `[tokens, hidden]` after the last block for the tokens of `work`, in its order."""
        tokens = [token for item in work for token in item.tokens]
        positions = [position for item in work for position in range(item.position, item.position + item.count)]
        entries = tuple(map(_entry, work))
        released = tuple(self.admission.released)
        self.admission.released.clear()
        x = self.deployment.vocabulary.embedding(tokens, positions)
        require_finite(x, "a row of the embedding", "the model is damaged; make the pack again from its source")
        hidden = self.deployment.forward(entries, released, x)
        require_finite(hidden, "the sum after the last block")
        self._batcher.commit(work)
        return hidden

    def _deliver_rows(self, request: Request, work: SequenceOf[Work], rows: F32) -> None:
        """Pass a request its part of the hidden states `rows`, if it asks for them."""
        starts = accumulate((item.count for item in work), initial=0)
        for start, item in zip(starts, work, strict=False):
            if item.sequence is request.sequence:
                request.take_rows(rows[start : start + item.count], item.completes)

    def _draw(self, work: SequenceOf[Work], rows: F32) -> dict[int, int]:
        """Sample tokens for every request whose sequence this step completes; `rows` are the step's hidden states.

        Return how many drafted tokens of each sequence were right, by its id.
        """
        requests = {each.sequence.id: each for each in self.admission.running if each.rows is None}
        ends = accumulate(item.count for item in work)
        drawn = [pair for pair in zip(work, ends, strict=True) if pair[0].completes and pair[0].sequence.id in requests]
        if not drawn:
            return {}
        picked = [row for item, end in drawn for row in range(end - 1 - len(item.drafted), end)]
        logits = self.deployment.vocabulary.head(rows if len(rows) == len(picked) else rows[picked])
        at, first, right = perf_counter(), 0, dict[int, int]()
        for item, _ in drawn:
            own = logits[first : first + 1 + len(item.drafted)]
            id_, first = item.sequence.id, first + len(own)
            right[id_] = requests[id_].take(own, item.drafted, at, self.context)
            self._batcher.accept(item, right[id_])
        return right


def _entry(work: Work) -> StepEntry:
    """Return `work` as an entry of the `Step` message, in which the slots of states are numbered from 1."""
    read, write = (0 if slot is None else slot + 1 for slot in (work.read, work.write))
    return StepEntry(work.sequence.id, work.position, work.count, work.kept, work.appended, read, write)
