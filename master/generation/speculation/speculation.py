"""The drafts of a step: each running request's next tokens.

A draft comes from the grammar, if only one text may follow, from an earlier occurrence of the latest tokens, or from a
model.
"""

from array import array
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from math import prod
from time import perf_counter

import numpy as np
import numpy.typing as npt

from master.generation.batcher import Work
from master.generation.request import Request
from master.generation.speculation.draftmodel import DraftModel
from master.generation.speculation.drafts import MODELS, Chances, Draft, Kind, Source, any_of, looked_up, of_model
from master.generation.speculation.lookup import EarlierAnswers, look_up
from master.generation.speculation.mtpdrafts import MtpDrafts
from master.generation.speculation.pace import ROWS, Pace

_MEASURED = 32  # steps after which their mean time counts
_IDLE = 64  # steps without a request for a draft after which the layer for multi-token prediction rests


@dataclass
class _Ahead:
    """The drafts of one sequence, if its drafted tokens run as steps of their own.

    `coming` has the tokens for the next steps, `sent` the kinds of the tokens in flight.
    """

    source: Source
    coming: Draft
    sent: deque[Kind] = field(default_factory=deque)
    stopped: bool = False


class Speculation:
    """The drafter of an engine. It belongs to the engine's thread."""

    def __init__(self) -> None:
        """Create a drafter; `renew` gives it the deployment's model."""
        self.drafted, self.accepted = Counter[Source](), Counter[Source]()  # drafted and right tokens so far, by source
        self._model: DraftModel | MtpDrafts | None = None
        self._drafting: float | None = None  # seconds that the model took for the next step; None: it was not used
        self._following = 0.0  # seconds that the model took to follow sequences since it was last judged
        self._idle = 0  # steps since the model was last asked for a draft
        self._earlier = EarlierAnswers()
        self._chances = Chances()
        self._pace = Pace()
        self._ahead: dict[int, _Ahead] = {}  # by the id of a sequence whose drafts are steps of their own

    def renew(self, model: DraftModel | MtpDrafts | None) -> None:
        """Forget the times of steps, because the deployment was replaced.

        `model` drafts where the other sources have no draft, or a worse one.
        """
        self._pace, self._model = Pace(), model
        self._ahead.clear()

    def see(self, requests: Sequence[Request], work: Sequence[Work], rows: npt.NDArray[np.float32]) -> None:
        """Pass the last hidden states of a step to the layer for multi-token prediction, if there is one.

        While the layer is not to draft, or was not asked to for some time, let it rest.

        `requests` run, `work` is what the step did, and `rows` are its hidden states `[tokens, hidden]`.
        """
        if not isinstance(self._model, MtpDrafts):
            return
        self._idle += all(item.known == 1 for item in work)
        if self._pace.model.off or self._idle > _IDLE:
            self._model.rest()
            return
        began, drawing = perf_counter(), {each.sequence.id for each in requests if each.rows is None}
        self._model.see(work, rows, drawing)
        self._following += perf_counter() - began

    def choose(self, requests: Sequence[Request], context: int, ahead: int = 1, alone: bool = True) -> dict[int, Draft]:
        """Return the drafts that are worth running in the next step, by sequence id.

        There are no drafts if the step runs a prompt, because it then has too many rows. Drafts are left to
        `next_ahead` if that is faster.

        Args:
            requests: all requests of the step.
            context: the maximum number of tokens of a sequence.
            ahead: the maximum number of steps of a request in flight; 1 if the step has several requests.
            alone: False if the step follows others in flight, so that more rows would delay their requests.
        """
        self._drafting = None
        for each in requests:
            self.stop_ahead(each)
        if not self._pace.drafts or len(requests) >= ROWS or not all(map(_draws, requests)):
            return {}
        plain, asked = len(requests), {each: _most(each, context) for each in requests}
        found = {} if self._pace.others.off else {each.sequence.id: self._draft(each, asked[each]) for each in requests}
        if ahead > 1 and self._runs_ahead(requests[0].sequence.id, found, ahead):
            return {}
        if not alone:
            return {}
        found = self._cut(found, plain)
        if self._model is None or self._pace.model.off:
            return found
        worse = {
            each: most
            for each, most in asked.items()
            if most > 0 and not self._better(found.get(each.sequence.id), self._model)
        }
        others = {id_: draft for id_, draft in found.items() if id_ not in {each.sequence.id for each in worse}}
        drafted = self._ask(self._model, worse, plain, self._rows(others))
        return self._cut(found | drafted, plain)

    def judge(self, work: Sequence[Work], drafts: Mapping[int, Draft], right: Mapping[int, int]) -> None:
        """Record how many of each sequence's drafted tokens in a step that did `work` were right.

        `right` has these numbers by the sequence's id. It lacks sequences that ended or were preempted during the step.
        """
        for item in work:
            if item.drafted and item.sequence.id in right:
                kinds, good = drafts[item.sequence.id].kinds, right[item.sequence.id]
                self._count(kinds[0][0], len(item.drafted), good)
                for index, kind in enumerate(kinds[: min(good + 1, len(item.drafted))]):
                    self._chances.learn(kind, index < good)

    def learn(self, work: Sequence[Work], tokens: int, seconds: float) -> None:
        """Record a step that took `seconds`, did `work` and brought `tokens` tokens for all sequences together."""
        if len(work) <= ROWS and all(item.known == 1 for item in work):
            drafted, spent = sum(len(item.drafted) for item in work), self._drafting
            if spent is not None:
                spent, self._following = spent + self._following, 0.0
            self._pace.learn(len(work), drafted, tokens, seconds, spent)

    @property
    def plain_step(self) -> float | None:
        """Mean seconds of a step with one token, from at least `_MEASURED` steps; None if there were fewer.

        With several stages, only steps without another step in flight are counted.
        """
        return self._pace.times.measured(1, _MEASURED)

    def next_ahead(self, request: Request, context: int, most: int) -> int | None:
        """Return a drafted token for one more step of a request, after all its steps that are in flight.

        Return None if the request's drafts are not steps of their own, if there is no draft, or if the request would
        have more than `most` steps in flight.
        """
        sequence, own = request.sequence, self._ahead.get(request.sequence.id)
        if (
            own is None
            or own.stopped
            or not self._pace.drafts
            or len(sequence.ahead) + 1 >= self._pace.most_ahead(most)
        ):
            return None
        if not sequence.ahead and own.sent:  # the sequence was preempted
            own.sent.clear()
            own.coming = Draft((), ())
        if not own.coming.tokens:
            own.coming = self._draft_after(request, _most(request, context) - len(sequence.ahead))
        if not own.coming.tokens:
            return None
        token, kind = own.coming.tokens[0], own.coming.kinds[0]
        own.coming = Draft(own.coming.tokens[1:], own.coming.kinds[1:])
        own.sent.append(kind)
        return token

    def stop_ahead(self, request: Request) -> None:
        """Stop running a request's drafts as steps of their own. No drafts of it may be in flight."""
        self._ahead.pop(request.sequence.id, None)

    def judge_ahead(self, request: Request, right: bool) -> None:
        """Record whether the oldest of a request's drafted tokens in flight was right.

        If it was wrong, drop the request's other drafts, because they continue the wrong token.
        """
        own = self._ahead[request.sequence.id]
        kind, judged = own.sent[0], 1 if right and not request.finished else len(own.sent)
        self._chances.learn(kind, right)
        self._count(kind[0], judged, int(right))
        request.drafts.count(judged, int(right))
        if right:
            own.sent.popleft()
        else:
            own.sent.clear()
            own.coming = Draft((), ())

    def learn_ahead(self, id_: int, tokens: int, seconds: float, followed: bool, streams: int) -> None:
        """Record the result of a step of the sequence `id_`, if its drafts are steps of their own.

        Arguments are those of `Pace.learn_ahead`.
        """
        own = self._ahead.get(id_)
        if own is not None:
            gain = self._pace.model if own.source in MODELS else self._pace.others
            self._pace.learn_ahead(tokens, seconds, followed, streams, gain)
            own.stopped = own.stopped or gain.off

    def keep(self, request: Request) -> None:
        """Remember the answer of a request that has ended."""
        tokens = request.sequence.tokens
        self.stop_ahead(request)
        if request.made:
            self._earlier.keep(request.client.salt, tokens[len(tokens) - request.made :])
        if self._model is not None:
            self._model.release(request.sequence.id)

    def _runs_ahead(self, id_: int, found: Mapping[int, Draft], most: int) -> bool:
        """Decide whether drafts of the sequence `id_` run as steps of their own; if so, record that and return True.

        `found` has drafts from the grammar and from lookup, by sequence id. At most `most` steps may be in flight.
        """
        draft, model = found.get(id_, Draft((), ())), None if self._pace.model.off else self._model
        by_model = model if model is not None and not (draft.tokens and self._better(draft, model)) else None
        if by_model is None and not draft.tokens:
            return False
        chance = self._chances.of(any_of(by_model.source) if by_model else draft.kinds[0])
        if not self._pace.runs_ahead(chance, most, self._pace.drafting.expect(1, 0.0) if by_model else 0.0):
            return False
        self._ahead[id_] = _Ahead(
            by_model.source if by_model else draft.kinds[0][0], Draft((), ()) if by_model else draft
        )
        return True

    def _draft_after(self, request: Request, most: int) -> Draft:
        """Return at most `most` tokens that may follow the drafted tokens in flight; at most one if a model drafts."""
        sequence = request.sequence
        if most <= 0:
            return Draft((), ())
        forced = request.sampler.forced()
        if len(forced) > len(sequence.ahead) and forced[: len(sequence.ahead)] == sequence.ahead:
            coming = tuple(forced[len(sequence.ahead) :][:most])
            return Draft(coming, len(coming) * (("grammar", 0),))
        text = array("i", [*sequence.tokens, *sequence.ahead])
        if self._ahead[sequence.id].source in MODELS and self._model is not None:
            return self._one_of_model(self._model, request, text)
        found, match = look_up(text, self._earlier.of(request.client.salt), most)
        return self._allowed_after(request, found, len(found) * (looked_up(match),))

    def _one_of_model(self, model: DraftModel | MtpDrafts, request: Request, text: "array[int]") -> Draft:
        """Return the token with which the model continues `text`, a request's tokens followed by those in flight."""
        began, self._idle = perf_counter(), 0
        live = model.follow([replace(request.sequence, tokens=text, ahead=[])])
        if not live:
            return Draft((), ())
        known = len(live[0].tokens)
        (probability,) = model.continued(live)
        self._pace.drafting.learn(1, perf_counter() - began)
        token = model.since(request.sequence.id, known)[:1]
        return self._allowed_after(request, token, [of_model(model.source, probability)])

    def _allowed_after(self, request: Request, tokens: list[int], kinds: Sequence[Kind]) -> Draft:
        """Return the beginning of `tokens` that the grammar allows after the drafted tokens in flight, as a draft."""
        ahead = request.sequence.ahead
        allowed = tuple(request.sampler.allowed([*ahead, *tokens]))[len(ahead) :]
        return Draft(allowed, tuple(kinds[: len(allowed)]))

    def _draft(self, request: Request, most: int) -> Draft:
        """Return a draft of at most `most` tokens from the grammar, if it forces any, else from an earlier
        occurrence.
        """
        if most <= 0:
            return Draft((), ())
        if forced := request.sampler.forced()[:most]:
            return Draft(tuple(forced), len(forced) * (("grammar", 0),))
        found, match = look_up(request.sequence.tokens, self._earlier.of(request.client.salt), most)
        allowed = tuple(request.sampler.allowed(found))
        return Draft(allowed, len(allowed) * (looked_up(match),))

    def _ask(
        self, model: DraftModel | MtpDrafts, asked: Mapping[Request, int], plain: int, others: list[float]
    ) -> dict[int, Draft]:
        """Return the model's drafts by sequence id; `asked` has the maximum number of tokens for each request.

        Draft one token after another for each request, while that raises the expected tokens per second of the step.
        The step also has `plain` rows that are not drafted, and rows drafted by other sources, which yield tokens with
        the chances `others`.
        """
        if not asked or not self._worth(plain, others, len(asked) * [self._chances.of(any_of(model.source))]):
            return {}
        requests, asked_at, self._idle = {each.sequence.id: each for each in asked}, perf_counter(), 0
        live = model.follow([each.sequence for each in asked])
        known, began = {own.id: len(own.tokens) for own in live}, perf_counter()
        self._following += began - asked_at
        kinds: dict[int, list[Kind]] = {own.id: [] for own in live}
        spent = 0.0
        while live:
            drafted = others + [chance for each in kinds.values() for chance in self._chances.each(each)]
            coming = [prod(map(self._chances.of, (*kinds[own.id], any_of(model.source)))) for own in live]
            if not self._pace.continues(plain, drafted, coming, spent):
                break
            for own, probability in zip(live, model.continued(live), strict=True):
                kinds[own.id].append(of_model(model.source, probability))
            spent, before = perf_counter() - began, spent
            self._pace.drafting.learn(len(live), spent - before)
            live = [own for own in live if len(kinds[own.id]) < asked[requests[own.id]]]
        self._drafting = spent or None
        return {
            id_: self._of_model(requests[id_], model.since(id_, known[id_]), own) for id_, own in kinds.items() if own
        }

    def _worth(self, plain: int, others: list[float], first: list[float]) -> bool:
        """Return True if the model should draft at least one token for each request; else pause the model.

        `first` are the chances that these tokens are right; `plain` and `others` are as for `_ask`. Pausing saves time,
        because for any draft the model must also compute the tokens that it has missed. After the pause, the chances
        are learnt again.
        """
        if self._pace.continues(plain, others, first, 0.0):
            return True
        self._pace.rest()
        self._chances.forget_models()
        return False

    def _of_model(self, request: Request, tokens: list[int], kinds: Sequence[Kind]) -> Draft:
        allowed = tuple(request.sampler.allowed(tokens))
        return Draft(allowed, tuple(kinds[: len(allowed)]))

    def _better(self, draft: Draft | None, model: DraftModel | MtpDrafts) -> bool:
        return draft is not None and self._chances.of(draft.kinds[0]) >= self._chances.of(any_of(model.source))

    def _rows(self, drafts: Mapping[int, Draft]) -> list[float]:
        """Return, for each row of all `drafts`, the chance that it yields a token."""
        return [chance for draft in drafts.values() for chance in self._chances.each(draft.kinds)]

    def _cut(self, drafts: Mapping[int, Draft], plain: int) -> dict[int, Draft]:
        """Return the drafts cut to the lengths with the most expected tokens per second, without empty ones.

        `plain` is the number of the step's rows that are not drafted.
        """
        order, chances = list[int](), list[float]()
        rows = {id_: self._chances.each(draft.kinds) for id_, draft in drafts.items() if draft.tokens}
        ahead = [(-own[0], id_, 0) for id_, own in rows.items()]  # the chance of each sequence's next row, negative
        heapify(ahead)
        while ahead and len(order) < ROWS - plain:
            chance, id_, at = heappop(ahead)
            order.append(id_)
            chances.append(-chance)
            if at + 1 < len(rows[id_]):
                heappush(ahead, (-rows[id_][at + 1], id_, at + 1))
        lengths = Counter(order[: self._pace.rows(plain, chances)])
        return {id_: drafts[id_].cut(count) for id_, count in lengths.items()}

    def _count(self, source: Source, drafted: int, right: int) -> None:
        self.drafted[source] += drafted
        self.accepted[source] += right


def _draws(request: Request) -> bool:
    """Return True if the next step yields a token of the request."""
    return request.rows is None and request.sequence.pending == 1


def _most(request: Request, context: int) -> int:
    """Return the maximum number of drafted tokens for a request; one further token is drawn after a draft."""
    return min(ROWS - 1, request.limit - request.made - 1, context - len(request.sequence.tokens) - 1)
