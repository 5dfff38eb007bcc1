"""Drafts of a sequence's next tokens, and the learnt chance that each kind of drafted token is right."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Literal

from master.generation.speculation.pace import Chance

Source = Literal["grammar", "lookup", "mtp", "model"]
Kind = tuple[Source, int]
"""The source of a drafted token, and a number on which its chance also depends.

For lookup, the number is the length of the match, at most `LONG`. For a model, it is the probability that the model
gave the token, in parts of `LONG`.
"""

LONG = 8
MODELS: tuple[Source, ...] = ("mtp", "model")
_ALL = -1  # stands for all tokens of a model


@dataclass(frozen=True)
class Draft:
    """Tokens that may follow a sequence, and for each the kind of source that it comes from."""

    tokens: tuple[int, ...]
    kinds: tuple[Kind, ...]

    def cut(self, count: int) -> "Draft":
        """Return the first `count` tokens."""
        return Draft(self.tokens[:count], self.kinds[:count])


def looked_up(match: int) -> Kind:
    """Return the kind of tokens that were found by a match of `match` tokens."""
    return "lookup", min(match, LONG)


def of_model(source: Source, probability: float) -> Kind:
    """Return the kind of a token to which the model `source` gives `probability`."""
    return source, int(probability * LONG)


def any_of(source: Source) -> Kind:
    """Return the kind that stands for all tokens of the model `source`."""
    return source, _ALL


class Chances:
    """The chance of each kind of drafted token to be right if all before it were, from 0 to 1."""

    def __init__(self) -> None:
        self._found: dict[Kind, Chance] = {}

    def of(self, kind: Kind) -> float:
        """Return the chance of a token of this kind."""
        return self._of(kind).share

    def each(self, kinds: Sequence[Kind]) -> list[float]:
        """Return, for each token of a draft with these `kinds`, the chance that it and all before it are right."""
        return list(accumulate(map(self.of, kinds), mul))

    def learn(self, kind: Kind, right: bool) -> None:
        """Record whether a token of this kind was right."""
        for each in {kind, any_of(kind[0])} if kind[0] in MODELS else {kind}:
            self._of(each).learn(right)

    def forget_models(self) -> None:
        """Forget the chances of models' tokens, so that they are learnt again."""
        self._found = {kind: chance for kind, chance in self._found.items() if kind[0] not in MODELS}

    def _of(self, kind: Kind) -> Chance:
        source, known = kind
        if kind not in self._found:
            probable = known != _ALL and source in MODELS
            match = LONG if source == "grammar" or known == _ALL else known
            first = Chance.of_probability((known + 0.5) / (LONG + 0.5)) if probable else Chance.first(match)
            self._found[kind] = first
        return self._found[kind]
