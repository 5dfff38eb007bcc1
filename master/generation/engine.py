"""The step loop: from requests to tokens. A step runs on every node; complete sequences then get their next token."""

from array import array
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import accumulate, count
from time import perf_counter

import numpy as np
import numpy.typing as npt

from master.deployment.deployment import Deployment
from master.generation.admission import Admission
from master.generation.batcher import Work
from master.generation.client import Client
from master.generation.request import Request
from master.generation.sequence import Sequence
from master.generation.speculation.draftmodel import DraftModel
from master.generation.speculation.drafts import Draft
from master.generation.speculation.mtpdrafts import MtpDrafts
from master.generation.speculation.speculation import Speculation
from master.generation.steps import Steps
from tpi.errors import UsageError

F32 = npt.NDArray[np.float32]

MOST_RUNNING = 64  # limit of requests at once; more would only make each slower


class Engine:
    """Runs requests on a deployment, which can be replaced between two steps without losing any sequence.

    Requests join and leave at every step: `master.generation.admission.Admission` decides which ones run.
    `master.generation.thread.EngineThread` runs the steps.
    """

    def __init__(self, deployment: Deployment, most: int = MOST_RUNNING, model: DraftModel | None = None) -> None:
        """Create an engine in which at most `most` requests run at once; `model` is the draft model, if any."""
        self.admission = Admission(most)
        self.speculation, self.drafts, self._model = Speculation(), True, model
        self._sequences: dict[int, Sequence] = {}
        self._ids = count()
        self._result_at = 0.0  # when the latest result of a step came, `perf_counter` seconds
        self._deploy(deployment)

    @property
    def context(self) -> int:
        """The maximum number of tokens of a sequence."""
        return self.deployment.limits.context

    @property
    def requests(self) -> list[Request]:
        """All unfinished requests: the running ones, then the waiting ones."""
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
        request.sequence.drop_ahead()
        self.speculation.stop_ahead(request)
        self.admission.withdraw(request)

    def step(self) -> None:
        """Start steps until one is in flight in each stage, and finish the step that was started first.

        Each request in it whose known tokens are all computed gets its next token. With one stage, every step has all
        requests.

        Raises:
            NodeLost, NodeError: if a worker is lost or fails. Requests stay as they were before the step.
            PlanError: if there are too few pages for the next tokens of a single sequence.
        """
        self.admission.admit(perf_counter())
        self.admission.make_room()
        while len(self._in_flight) < self.deployment.most_in_flight and (
            started := self._start_next() or self._start_ahead()
        ):
            self._in_flight.append(started)
        if self._in_flight:
            self._finish(self._in_flight.popleft())

    def _start_next(self) -> "_Started | None":
        """Start a step with the requests that have tokens to run; return None if there are no such requests."""
        running, alone = self.admission.running, not self._in_flight
        turn = self._in_turn(running)
        if not turn:
            return None
        whole, ahead = alone and len(turn) == len(running), self._most_of_each() if len(turn) == 1 else 1
        drafts = dict[int, Draft]()
        if self._speculates and (whole or ahead > 1):
            drafts = self.speculation.choose(turn, self.context, ahead, whole)
        began, work = perf_counter(), self._steps.batcher.pick([request.sequence for request in turn], drafts)
        self._steps.start(work, self.admission.released)
        return _Started(work, drafts, began, alone)

    def _start_ahead(self) -> "_Started | None":
        """Start a step with a drafted token of a request whose own tokens are all in flight.

        The step fills a stage that would be idle. The requests with the fewest drafted tokens in flight come first.
        Return None if there is no such token.
        """
        most = self._most_of_each()
        if most < 2 or not self._speculates:
            return None
        running, batcher = self.admission.running, self._steps.batcher
        for request in sorted(running, key=lambda each: len(each.sequence.ahead)):
            sequence = request.sequence
            sent = request.rows is None and sequence.in_flight and not sequence.pending
            if not sent or not batcher.has_room_ahead(sequence, len(running)):
                continue
            if (token := self.speculation.next_ahead(request, self.context, most)) is not None:
                work, began, alone = [batcher.ahead(sequence, token)], perf_counter(), not self._in_flight
                self._steps.start(work, self.admission.released)
                return _Started(work, {}, began, alone)
        return None

    @property
    def _speculates(self) -> bool:
        return self.drafts and self.deployment.drafts

    def _most_of_each(self) -> int:
        """Return how many steps each running request may have in flight, if all of them may have equally many.

        In models with recurrent layers, it is one step.
        """
        if self.deployment.pages.states is not None:
            return 1
        return self.deployment.most_in_flight // max(1, len(self.admission.running))

    def _in_turn(self, running: list[Request]) -> list[Request]:
        """Return the requests for the next step: one part of them, so that the others fill the other stages.

        Requests with no tokens in flight come first. In models with recurrent layers, a request has at most one step in
        flight, because its next step continues from the state that this step writes.
        """
        stateful = self.deployment.pages.states is not None
        ready = [each for each in running if each.sequence.pending and not (stateful and each.sequence.in_flight)]
        ready.sort(key=lambda each: each.sequence.in_flight)
        return ready[: -(-len(running) // self.deployment.most_in_flight)]

    def _finish(self, started: "_Started") -> None:
        """Wait for the result of a step, and give each of its requests the next token or hidden states."""
        running, work = self.admission.running, started.work
        rows = self._steps.result(work)
        for request in running:
            if request.rows is not None:
                self._deliver_rows(request, work, rows)
        before = sum(request.made for request in running)
        right = self._draw(work, rows)
        self.speculation.judge(work, started.drafts, right)
        now = perf_counter()
        if self.drafts and self.deployment.drafts:
            self.speculation.see(running, work, rows)
        if started.alone and not self._in_flight:
            tokens = sum(request.made for request in running) - before
            self.speculation.learn(work, tokens, now - started.began)
        self._learn_ahead(started, right, now)
        for request in running:
            if request.finished:
                request.sequence.drop_ahead()
                self.speculation.keep(request)
        self.admission.running = [request for request in running if not request.finished]

    def _learn_ahead(self, started: "_Started", drawn: Mapping[int, int], now: float) -> None:
        """Record the time of a step if it ran only one sequence, whose drafts run as steps of their own.

        The keys of `drawn` are the ids of the sequences that got tokens. `now` is the time of the result in
        `perf_counter` seconds.
        """
        before, self._result_at = self._result_at, now
        if len(started.work) == 1:
            id_ = started.work[0].sequence.id
            seconds, followed = now - max(before, started.began), started.began < before
            self.speculation.learn_ahead(id_, int(id_ in drawn), seconds, followed, max(1, len(self.admission.running)))

    def logits(self, tokens: SequenceOf[int]) -> F32:
        """Return the logits after each of `tokens`, `[len(tokens), vocab]`, computed as one new sequence."""
        sequence = self.admit(tokens)  # without reuse, so that every row is computed
        rows = []
        while sequence.pending:
            work = self._steps.batcher.pick([sequence])
            self._steps.start(work, self.admission.released)
            rows.append(self.deployment.vocabulary.head(self._steps.result(work)))
        self.release(sequence)
        return np.concatenate(rows)

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence and give its pages back. Their contents can be found until they are reused."""
        self.admission.give_back(sequence)
        self._sequences.pop(sequence.id, None)

    def _deploy(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self._in_flight = deque[_Started]()
        self._steps = Steps(deployment, deployment.limits.chunk)
        self.speculation.renew(self._model or (MtpDrafts(deployment.mtp) if deployment.mtp else None))
        self.admission.deploy(deployment)

    def _deliver_rows(self, request: Request, work: SequenceOf[Work], rows: F32) -> None:
        """Pass a request its part of the hidden states `rows`, if the request is for hidden states."""
        starts = accumulate((item.count for item in work), initial=0)
        for start, item in zip(starts, work, strict=False):
            if item.sequence is request.sequence and item.counts:
                request.take_rows(rows[start : start + item.count], item.completes)

    def _draw(self, work: SequenceOf[Work], rows: F32) -> dict[int, int]:
        """Sample tokens for every request whose last known token was in this step.

        `rows` are the step's hidden states `[tokens, hidden]`. Return how many drafted tokens of each sequence were
        right, by its id.
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
            id_, first, ahead = item.sequence.id, first + len(own), len(item.sequence.ahead)
            right[id_] = requests[id_].take(own, item.drafted, at, self.context)
            self._steps.batcher.accept(item, right[id_])
            if ahead:
                self.speculation.judge_ahead(requests[id_], item.counts)
        return right


@dataclass(frozen=True)
class _Started:
    """A step in flight, with its work and the drafts in it.

    `began` is the time of its start in `perf_counter` seconds; `alone` is True if no other step was then in flight.
    """

    work: SequenceOf[Work]
    drafts: Mapping[int, Draft]
    began: float
    alone: bool
