"""The sampler: bias, penalties, the grammar's mask, temperature, top-k, top-p and min-p, then a random token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from numpy.random import default_rng

from tpi.errors import NotFiniteError, UsageError

F32 = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

RANDOM_SEED = -1


@dataclass(frozen=True)
class Bounds:
    """The range of a setting, from `low` to `high`. If `open` is True, `low` itself is excluded."""

    low: float
    high: float
    open: bool = False

    def hold(self, value: float) -> bool:
        """Return True if `value` is within the bounds; False for NaN."""
        return self.low <= value <= self.high and not (self.open and value == self.low)

    def __str__(self) -> str:
        return f"{'above' if self.open else 'from'} {self.low:g} to {self.high:g}"


TEMPERATURE = Bounds(0, 100)
TOP_K = Bounds(0, 1 << 31)
TOP_P = Bounds(0, 1, open=True)
MIN_P = Bounds(0, 1)
REPEAT_PENALTY = Bounds(0.01, 100)
COUNT_PENALTY = Bounds(-100, 100)
BIAS = Bounds(-100, 100)
SEED = Bounds(RANDOM_SEED, (1 << 63) - 1)


@dataclass(frozen=True)
class Sampling:
    """Settings for choosing a token. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 switch a filter off.

    The same `seed` draws the same tokens; None and -1 draw others every time. The frequency penalty is subtracted from
    a token's logit as often as the answer has the token, and the presence penalty once if it has it (OpenAI's API
    reference). Then `bias` is added to the logits of its tokens. Within the bounds of the settings, no logit below 1e36
    becomes infinite.

    Raises:
        UsageError: if a value is outside its bounds.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    suppressed: tuple[int, ...] = ()  # tokens that are never drawn
    # names of the settings that the user gave; the model's own values replace the others. None: the user gave all
    given: frozenset[str] | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any], **others: Any) -> "Sampling":
        """Return settings with the values of `given` that are not None. Only these count as given by the user."""
        named = {name: value for name, value in given.items() if value is not None}
        return cls(**named, **others, given=frozenset(named))

    def __post_init__(self) -> None:
        settings = (
            ("--temp", self.temperature, TEMPERATURE),
            ("--top-k", self.top_k, TOP_K),
            ("--top-p", self.top_p, TOP_P),
            ("--min-p", self.min_p, MIN_P),
            ("--repeat-penalty", self.repeat_penalty, REPEAT_PENALTY),
            ("--seed", RANDOM_SEED if self.seed is None else self.seed, SEED),
            ("frequency_penalty", self.frequency_penalty, COUNT_PENALTY),
            ("presence_penalty", self.presence_penalty, COUNT_PENALTY),
            *(("logit_bias", value, BIAS) for value in self.bias.values()),
        )
        for name, value, bounds in settings:
            if not bounds.hold(value):
                raise UsageError(f"{name} {value} is out of range; give a number {bounds}")


@dataclass(frozen=True)
class Logprobs:
    """Natural logarithms of the probabilities of the drawn token and of the best tokens (with ids, best first)."""

    drawn: float
    best: tuple[tuple[int, float], ...]


class Constraint(Protocol):
    """A grammar's state: it decides which tokens may come next."""

    def allow(self, logits: F32) -> F32:
        """Return `logits` `[vocab]` with minus infinity for every token that may not come next."""

    def accept(self, token: int) -> None:
        """Advance the state by `token`."""

    def forced(self) -> list[int]:
        """Return the token ids of the text that must come next; empty if several texts may follow.

        The state does not change.
        """

    def allowed(self, tokens: Sequence[int]) -> int:
        """Return the number of `tokens`, from the first on, that may come next. The state does not change."""


class Sampler:
    """A sampler of token ids. Two samplers with the same seed draw the same ids from the same logits."""

    def __init__(self, sampling: Sampling, constraint: Constraint | None = None) -> None:
        self.sampling = sampling
        self._constraint = constraint
        self._random = default_rng(None if sampling.seed == RANDOM_SEED else sampling.seed)

    def draw(self, logits: F32, history: Sequence[int], prompt: int, best: int | None) -> tuple[int, Logprobs | None]:
        """Draw a token id from `logits` `[vocab]`; arguments and errors are those of `sample`.

        If `best` is not None, also return the log probabilities of the drawn token and of the `best` likeliest tokens.
        """
        token = self.sample(logits, history, prompt)
        return token, None if best is None else _logprobs(logits, token, best)

    def forced(self) -> list[int]:
        """Return the token ids that the grammar forces to come next; empty without a grammar."""
        return [] if self._constraint is None else self._constraint.forced()

    def allowed(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the beginning of `tokens` that the grammar allows to come next."""
        return tokens if self._constraint is None else tokens[: self._constraint.allowed(tokens)]

    def sample(self, logits: F32, history: Sequence[int] = (), prompt: int = 0) -> int:
        """Return one token id drawn from `logits` `[vocab]`.

        The repeat penalty applies to all of `history`; the other penalties leave out its first `prompt` tokens.

        Raises:
            NotFiniteError: if the greatest logit is not finite.
            UsageError: if no token may come next.
        """
        settings = self.sampling
        if not np.isfinite(logits.max()):  # max() is NaN if any logit is
            raise NotFiniteError("the logits are not finite: the model's head is damaged; make the pack again")
        logits = _penalise(logits, history, settings.repeat_penalty)
        logits = _discourage(logits, history[prompt:], settings)
        if self._constraint is not None:
            logits = self._constraint.allow(logits)
        token = self._choose(logits)
        if self._constraint is not None:
            self._constraint.accept(token)
        return token

    def _choose(self, logits: F32) -> int:
        settings = self.sampling
        best = int(logits.argmax())
        if not np.isfinite(logits[best]):
            raise UsageError("the grammar allows no token here; change the grammar, or ask without one")
        if settings.temperature == 0:
            return best
        ids, scores = _top_k(logits, settings.top_k)
        probabilities = _softmax(scores, settings.temperature)
        keep = _nucleus(probabilities, settings.top_p) & (probabilities >= settings.min_p * probabilities[0])
        kept = probabilities[keep]
        return int(self._random.choice(ids[keep], p=kept / kept.sum()))


def _logprobs(logits: F32, token: int, best: int) -> Logprobs:
    """Return the log-probabilities of `token` and of the `best` likeliest tokens, with the logits at temperature 1."""
    scores = logits.astype(np.float64)
    top = scores.max()
    scores -= top + np.log(np.exp(scores - top).sum())
    ids, _ = _top_k(logits, best) if best else (np.empty(0, np.int64), None)
    return Logprobs(float(scores[token]), tuple((int(one), float(scores[one])) for one in ids))


def _discourage(logits: F32, made: Sequence[int], settings: Sampling) -> F32:
    """Return `logits` less the penalties of the tokens `made`, plus the bias; exclude suppressed tokens."""
    often, once = settings.frequency_penalty, settings.presence_penalty
    penalised = bool(made) and (often != 0 or once != 0)
    if not penalised and not settings.bias and not settings.suppressed:
        return logits
    logits = logits.copy()
    if penalised:
        tokens, counts = np.unique(np.asarray(made, np.int64), return_counts=True)
        logits[tokens] -= (often * counts + once).astype(np.float32)
    for token, bias in settings.bias.items():
        logits[token] += np.float32(bias)
    logits[[token for token in settings.suppressed if token < logits.size]] = -np.inf
    return logits


def _penalise(logits: F32, history: Sequence[int], penalty: float) -> F32:
    """Divide positive and multiply negative logits of tokens seen before (Keskar et al. 2019, CTRL, section 4.1)."""
    if penalty == 1.0 or not history:
        return logits
    seen = np.unique(np.asarray(history, np.int64))
    logits = logits.copy()
    logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    return logits


def _top_k(logits: F32, k: int) -> tuple[Ids, npt.NDArray[np.float64]]:
    """Return the `k` best token ids, best first, with their logits; all token ids if `k` is 0."""
    ids = np.argpartition(logits, -k)[-k:] if 0 < k < logits.size else np.arange(logits.size)
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    return ids, logits[ids].astype(np.float64)


def _nucleus(probabilities: npt.NDArray[np.float64], top_p: float) -> npt.NDArray[np.bool_]:
    """Return a mask of the first of the descending `probabilities` whose sum reaches `top_p` (Holtzman et al. 2020)."""
    return np.cumsum(probabilities) - probabilities < top_p


def _softmax(scores: npt.NDArray[np.float64], temperature: float) -> npt.NDArray[np.float64]:
    """Return the probabilities of descending `scores`, of which the first is finite, at a `temperature` above 0."""
    with np.errstate(over="ignore"):  # overflow to minus infinity is right for scores far below the best
        weights = np.exp((scores - scores[0]) / temperature)
    return np.asarray(weights / weights.sum())
