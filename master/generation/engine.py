"""The step loop: from requests to tokens. A step runs on every node of the deployment; what is complete is sampled."""

from array import array
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from itertools import accumulate, count
from time import perf_counter

import numpy as np
import numpy.typing as npt

from master.deployment.deployment import Deployment
from master.generation.admission import Admission
from master.generation.batcher import EVEN, Batcher, Work
from master.generation.client import Client
from master.generation.request import Request, Sampled
from master.generation.sampler import Sampler
from master.generation.sequence import Sequence
from tpi.errors import DeviceError, KernelError, NodeError, TpiError, UsageError
from tpi.finite import require_finite
from tpi.net.messages import StepEntry

F32 = npt.NDArray[np.float32]

MOST_RUNNING = 64  # requests at once; more of them would only make each slower


class Engine:
    """Runs requests on a deployment, which can be replaced between two steps: sequences live as long as wanted.

    Requests join and leave at every step, see `master.generation.admission.Admission`.
    """

    def __init__(self, deployment: Deployment, most: int = MOST_RUNNING) -> None:
        """`most`: requests that run at once."""
        self.admission = Admission(most)
        self.recover: Callable[[TpiError], bool] = lambda error: False
        """Called where a step of `generate` fails: whether it can go on, on another deployment."""
        self.between: Callable[[bool], None] = lambda fresh: None
        """Called before each step, with whether a request is about to begin; it may replace the deployment."""
        self.wanted: Callable[[], bool] = lambda: True
        """Asked several times a second by whoever waits within `recover` or `between`: whether anybody still does."""
        self._sequences: dict[int, Sequence] = {}
        self._ids = count()
        self._deploy(deployment)

    @property
    def context(self) -> int:
        """The most tokens of a sequence."""
        return self.deployment.limits.context

    @property
    def requests(self) -> list[Request]:
        """All that are not finished: those that run, and those that wait."""
        return [*self.admission.running, *self.admission.waiting]

    def replace(self, deployment: Deployment) -> None:
        """Go on with another deployment. Pages are filled again by computing the tokens that sequences have so far."""
        for sequence in self._sequences.values():
            sequence.forget()
        self._deploy(deployment)

    def admit(self, tokens: SequenceOf[int], reuse: bool = False, client: Client | None = None) -> Sequence:
        """A new sequence that begins with the prompt `tokens`; it is the engine's until `release`.

        With `reuse`, what earlier sequences of the same salt have computed of the same tokens is not computed again.

        Raises:
            UsageError: if the prompt is empty or leaves no room in the context.
        """
        sequence = Sequence(next(self._ids), array("i"), reuse=reuse, client=client or Client())
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

    def submit(self, request: Request) -> None:
        """Answer `request` in the steps to come, beside all others; it leaves when it is finished or withdrawn."""
        if request.limit > 0 and len(request.sequence.tokens) < self.context:
            self.admission.waiting.push(request)
        else:
            request.finished = True

    def withdraw(self, request: Request) -> None:
        """Give a request up, wherever it is; its sequence keeps what it has."""
        request.finished = True
        self.admission.withdraw(request)

    def step(self) -> None:
        """Run one step of all requests; each that is complete gets a token.

        Raises:
            NodeLost, NodeError: if a worker is lost or fails; requests stay as they were before the step.
            PlanError: if there are too few pages for the next tokens of a single sequence.
        """
        self.between(bool(self.admission.waiting))
        self.admission.admit(perf_counter())
        self.admission.make_room()
        running = self.admission.running
        if not running:
            return
        work = self._batcher.pick([request.sequence for request in running])
        rows = self._forward(work)
        for request in running:
            if request.rows is not None:
                self._hand_out(request, work, rows)
        drawing = {request.sequence.id for request in running if request.rows is None}
        if ends := _last_rows(work, drawing):
            logits = self.deployment.vocabulary.head(rows if len(rows) == len(ends) else rows[list(ends.values())])
            self._push(dict(zip(ends, logits, strict=True)))
        self.admission.running = [request for request in running if not request.finished]

    def generate(
        self, sequence: Sequence, sampler: Sampler, limit: int, stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[Sampled]:
        """Tokens of one sequence as they are sampled, at most `limit`.

        Ends early where the context is full, or where `stopped`, which is asked before every step, says so.

        Raises:
            TpiError: if no token can be drawn.
        """
        made = deque[Sampled]()

        def sink(sampled: Sampled) -> bool:
            made.append(sampled)
            return True

        request = Request(sequence, sampler, limit, sink)
        self.submit(request)
        wanted, self.wanted = self.wanted, lambda: not stopped()
        try:
            while not request.finished and not stopped():
                self._advance(stopped)
                while made:
                    yield made.popleft()
            if request.error is not None:
                raise request.error
        finally:
            self.wanted = wanted
            self.withdraw(request)

    def logits(self, tokens: SequenceOf[int]) -> F32:
        """`[len(tokens), vocab]`: the logits after each of `tokens`, computed as one new sequence (for evaluation)."""
        sequence = self.admit(tokens)  # all of it is computed
        rows = []
        while sequence.pending:
            rows.append(self.deployment.vocabulary.head(self._forward(self._batcher.pick([sequence]))))
        self.release(sequence)
        return np.concatenate(rows)

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence, and give its pages back; what they hold can be found as long as it is there."""
        self.admission.give_back(sequence)
        self._sequences.pop(sequence.id, None)

    def _advance(self, stopped: Callable[[], bool]) -> None:
        """A step; where it fails, another deployment on which the next may not. Who has stopped minds no failure."""
        try:
            self._mended_step()
        except NodeError:
            if not stopped():
                raise

    def _mended_step(self) -> None:
        try:
            self.step()
        except (NodeError, DeviceError, KernelError) as error:
            if not self.recover(error):
                raise

    def _deploy(self, deployment: Deployment) -> None:
        self.deployment = deployment
        even = EVEN * deployment.vocabulary.config.hidden
        self._batcher = Batcher(deployment.pages, deployment.limits.chunk, even)
        self.admission.deploy(deployment)

    def _forward(self, work: SequenceOf[Work]) -> F32:
        """Hidden states `[tokens, hidden]` after the last block for the tokens of `work`, in its order."""
        tokens = [token for item in work for token in item.sequence.tokens[item.position :][: item.count]]
        positions = [position for item in work for position in range(item.position, item.position + item.count)]
        entries = tuple(
            StepEntry(item.sequence.id, item.position, item.count, item.kept, item.appended) for item in work
        )
        released = tuple(self.admission.released)
        self.admission.released.clear()
        x = self.deployment.vocabulary.embedding(tokens, positions)
        require_finite(x, "a row of the embedding", "the model is damaged; make the pack again from its source")
        hidden = self.deployment.forward(entries, released, x)
        require_finite(hidden, "the sum after the last block")
        self._batcher.commit(work)
        return hidden

    def _hand_out(self, request: Request, work: SequenceOf[Work], rows: F32) -> None:
        """Hidden states to a request that wants them."""
        starts = accumulate((item.count for item in work), initial=0)
        for start, item in zip(starts, work, strict=False):
            if item.sequence is request.sequence:
                request.take_rows(rows[start : start + item.count], item.completes)

    def _push(self, logits: Mapping[int, F32]) -> None:
        """A token for every request whose sequence has logits, by the sequence's number."""
        at = perf_counter()
        for request in self.admission.running:
            if (row := logits.get(request.sequence.id)) is not None:
                request.take(row, at, self.context)


def _last_rows(work: SequenceOf[Work], drawing: Container[int]) -> dict[int, int]:
    """Where the last token of each sequence of `drawing` that is complete stands in its step."""
    ends = accumulate(item.count for item in work)
    pairs = ((item, end - 1) for item, end in zip(work, ends, strict=True))
    return {item.sequence.id: row for item, row in pairs if item.completes and item.sequence.id in drawing}
