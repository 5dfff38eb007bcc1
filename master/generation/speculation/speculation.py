"""The drafts of a step: each running request's next tokens as the grammar forces them or as they occurred before."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal

from master.generation.batcher import Work
from master.generation.request import Request
from master.generation.speculation.lookup import EarlierAnswers, look_up
from master.generation.speculation.pace import ROWS, Chance, Pace

Source = Literal["grammar", "lookup"]
_LONG = 8  # matches of so many tokens and more count as one kind


@dataclass(frozen=True)
class Draft:
    """Tokens that may follow a sequence, and the kind of draft: its source, and the length of the match."""

    tokens: tuple[int, ...]
    kind: tuple[Source, int]


class Speculation:
    """The drafter of an engine. It belongs to the engine's thread."""

    def __init__(self) -> None:
        self.drafted, self.accepted = Counter[Source](), Counter[Source]()  # tokens so far
        self._earlier = EarlierAnswers()
        self._chances: dict[tuple[Source, int], Chance] = {}
        self._pace = Pace()

    def forget_times(self) -> None:
        """Begin to measure steps anew: the deployment was replaced."""
        self._pace = Pace()

    def choose(self, requests: Sequence[Request], context: int) -> dict[int, Draft]:
        """Return the drafts that are worth running in the next step, by sequence id; `context` in tokens.

        There are none if the step runs a prompt, as it then has too many rows.
        """
        if not self._pace.drafts or len(requests) >= ROWS or not all(map(_draws, requests)):
            return {}
        found = {each.sequence.id: self._draft(each, context) for each in requests}
        return self._cut({id_: draft for id_, draft in found.items() if draft.tokens}, len(requests))

    def learn(
        self, work: Sequence[Work], drafts: Mapping[int, Draft], right: Mapping[int, int], seconds: float
    ) -> None:
        """Take in a step: of each sequence's drafted tokens, the first `right` by its id were right."""
        for item in work:
            if item.drafted:
                kind, good = drafts[item.sequence.id].kind, right.get(item.sequence.id, 0)
                self.drafted[kind[0]] += len(item.drafted)
                self.accepted[kind[0]] += good
                for index in range(min(good + 1, len(item.drafted))):
                    self._chance(kind).learn(index < good)
        if len(work) <= ROWS and all(item.known == 1 for item in work):
            self._pace.learn(len(work), sum(len(item.drafted) for item in work), sum(right.values()), seconds)

    def keep(self, request: Request) -> None:
        """Remember the answer of a request that has ended."""
        tokens = request.sequence.tokens
        if request.made:
            self._earlier.keep(request.client.salt, tokens[len(tokens) - request.made :])

    def _draft(self, request: Request, context: int) -> Draft:
        tokens = request.sequence.tokens
        most = min(ROWS - 1, request.limit - request.made - 1, context - len(tokens) - 1)
        if most <= 0:
            return Draft((), ("lookup", 0))
        if forced := request.sampler.forced()[:most]:
            return Draft(tuple(forced), ("grammar", 0))
        found, match = look_up(tokens, self._earlier.of(request.client.salt), most)
        return Draft(tuple(request.sampler.allowed(found)), ("lookup", min(match, _LONG)))

    def _cut(self, drafts: Mapping[int, Draft], plain: int) -> dict[int, Draft]:
        """Return the beginnings of the drafts that raise the expected tokens per second."""
        order, chances = list[int](), list[float]()
        ahead: list[tuple[float, int]] = []  # the chance of each sequence's next row, negative
        for id_, draft in drafts.items():
            heappush(ahead, (-self._chance(draft.kind).share, id_))
        taken = Counter[int]()
        while ahead and len(order) < ROWS - plain:
            chance, id_ = heappop(ahead)
            order.append(id_)
            chances.append(-chance)
            taken[id_] += 1
            if taken[id_] < len(drafts[id_].tokens):
                heappush(ahead, (chance * self._chance(drafts[id_].kind).share, id_))
        lengths = Counter(order[: self._pace.rows(plain, chances)])
        return {id_: Draft(drafts[id_].tokens[:count], drafts[id_].kind) for id_, count in lengths.items()}

    def _chance(self, kind: tuple[Source, int]) -> Chance:
        return self._chances.setdefault(kind, Chance.first(_LONG if kind[0] == "grammar" else kind[1]))


def _draws(request: Request) -> bool:
    """Return True if the next step yields a token of the request."""
    return request.rows is None and request.sequence.pending == 1
