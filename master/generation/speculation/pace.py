"""The pace of steps: learnt times of a step by its number of rows, and learnt chances that drafts are right.

Further rows are drafted while they raise the expected tokens per second.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

ROWS = 16
"""The most rows of a step with drafts. Up to this number, a row's result has the same bits as in a step of its own."""

_FORGET = 0.1  # weight of a new measurement
_AFRESH = 64  # steps after which a plain step is measured again
# a step that runs ahead counts as a quarter of a step towards `_AFRESH`: a plain step then comes later, because it has
# to wait for all steps in flight
_AHEAD = 0.25
_OUTLIER = 3.0  # a measurement counts as at most this many times the mean
_PRIOR = 4.0  # weight of the first guess of a chance, in drafted tokens
_DECAY = 0.99  # weight of all earlier drafted tokens after one more
_FIRST = 0.5  # first guess of a chance
_GUESS = {2: 0.25, 3: 0.35}  # first guess by the length of a short match in tokens
_TRIED = 64  # number of tokens of steps with drafts after which the gain is judged
_OFF = 256  # length in tokens of the pause after a loss
_LONGEST = 4096  # length in tokens of the longest pause of a draft model; its speed is then measured again


@dataclass
class StepTimes:
    """The mean seconds of a step by its number of rows, 1 to `ROWS`; each new measurement has the weight `_FORGET`."""

    _seconds: dict[int, float] = field(default_factory=dict)
    _counts: dict[int, int] = field(default_factory=dict)

    def learn(self, rows: int, seconds: float) -> None:
        """Add the measurement of one step to the mean."""
        count = self._counts[rows] = self._counts.get(rows, 0) + 1
        mean = self._seconds.get(rows, seconds)
        weight = max(_FORGET, 1 / count)
        self._seconds[rows] = mean + weight * (min(seconds, _OUTLIER * mean) - mean)

    def measured(self, rows: int, steps: int) -> float | None:
        """Return the mean seconds of a step of `rows` rows; None if fewer than `steps` such steps were measured."""
        return self._seconds[rows] if self._counts.get(rows, 0) >= steps else None

    def expect(self, rows: int, unknown: float = 1.0) -> float:
        """Return the seconds of a step of `rows` rows. If not measured, derive them from the nearest measured number.

        If none was measured, one row is taken to last `unknown` seconds.
        """
        if not self._seconds:
            return unknown * _usual(rows)
        known = min(self._seconds, key=lambda each: (abs(each - rows), each))
        return self._seconds[known] * _usual(rows) / _usual(known)


def _usual(rows: int) -> float:
    """Return the usual time of a step of `rows` rows, as a multiple of a step of one row, on a memory-bound
    processor.
    """
    return 1 + 0.15 * (rows - 1) + 0.1 * max(0, rows - 4)


@dataclass
class Chance:
    """The chance that a drafted token is right if all before it were."""

    right: float
    tried: float = _PRIOR

    @classmethod
    def first(cls, match: int) -> "Chance":
        """Return the first guess for drafts after a match of `match` tokens."""
        return cls(_PRIOR * _GUESS.get(match, _FIRST + 0.025 * match))

    @classmethod
    def of_probability(cls, probability: float) -> "Chance":
        """Return the first guess for tokens to which a draft model gives `probability`."""
        return cls(_PRIOR * probability)

    @property
    def share(self) -> float:
        """The chance, from 0 to 1."""
        return min(1.0, self.right / self.tried)

    def learn(self, right: bool) -> None:
        """Record whether one drafted token was right."""
        self.right = _DECAY * self.right + right
        self.tried = _DECAY * self.tried + 1


@dataclass
class Gain:
    """A judgement of whether drafts save time. If they do not, drafting pauses for a while.

    The first pause has `_OFF` tokens. If drafts have saved no time since the last pause, the next one is twice as long,
    up to `longest` tokens.
    """

    longest: int = _OFF
    _next: int = _OFF  # length in tokens of the next pause
    _tokens: int = 0  # tokens of steps with drafts since the last judgement
    _saved: float = 0.0  # seconds saved in those steps
    _off: int = 0  # tokens for which nothing is drafted

    @property
    def off(self) -> bool:
        """True while nothing is drafted."""
        return self._off > 0

    @property
    def left(self) -> int:
        """Number of further tokens for which nothing is drafted."""
        return self._off

    def learn(self, tokens: int, saved: float) -> None:
        """Record a step that made `tokens` tokens and saved `saved` seconds, negative if it took longer."""
        self._tokens += tokens
        self._saved += saved
        if self._tokens >= _TRIED:
            if self._saved <= 0:
                self.pause()
            else:
                self._next = _OFF
            self._tokens, self._saved = 0, 0.0

    def pause(self) -> None:
        """Stop drafting for a while."""
        self._off, self._next = self._next, min(2 * self._next, self.longest)

    def pass_by(self, tokens: int) -> None:
        """Count `tokens` further tokens of the pause; do nothing if there is no pause."""
        self._off = max(0, self._off - tokens)


class Pace:
    """The times of steps and of a draft model, and judgements of whether the model's and other drafts save time."""

    def __init__(self) -> None:
        self.times = StepTimes()
        self.drafting = StepTimes()  # times of a draft model, by the number of sequences that it continues by a token
        self.others, self.model = Gain(), Gain(_LONGEST)
        self._since_plain = 0.0  # steps since the last one without drafts
        self._beat: float | None = None  # mean seconds between the results of steps in flight; None: not measured
        self._rested = 0  # tokens in the pauses of the draft model since its speed was last measured anew

    @property
    def drafts(self) -> bool:
        """True unless the next step must be a plain one, to measure how long that takes."""
        return self._since_plain < _AFRESH

    def rows(self, plain: int, chances: Sequence[float]) -> int:
        """Return the number of drafted rows, added to `plain` rows, with which a step gives the most tokens per second.

        `chances[i]` is the chance that the drafted row `i` yields a token; the highest comes first.
        """
        return self._best(plain, chances, 0.0)[0]

    def _best(self, plain: int, chances: Sequence[float], each: float) -> tuple[int, float]:
        """Return the number of drafted rows with which a step gives the most tokens per second, and this rate.

        Drafting a row takes `each` seconds. `chances` are as for `rows`.
        """
        best, best_rate, made = 0, plain / self.times.expect(plain), float(plain)
        for count, chance in enumerate(chances[: max(0, ROWS - plain)], 1):
            made += chance
            rate = made / (self.times.expect(plain + count) + count * each)
            if rate > best_rate:
                best, best_rate = count, rate
        return best, best_rate

    def runs_ahead(self, chance: float, most: int, drafting: float) -> bool:
        """Return True if drafted tokens of one sequence should be steps of their own, up to `most` at once.

        Otherwise they should be further rows of one step, because that yields as many or more tokens per second. With
        steps of their own, a token takes `a b + (1 - a) L` seconds: a is the `chance` that a drafted token is right if
        all before it were, b the time between two results while steps are in flight, and L the time of a step alone.

        Args:
            drafting: seconds to draft a token.
        """
        alone = self.times.expect(1)
        beat = alone / most + drafting if self._beat is None else self._beat
        _, rate = self._best(1, [chance**count for count in range(1, ROWS)], drafting)
        return chance * beat + (1 - chance) * alone < 1 / rate

    def most_ahead(self, most: int) -> int:
        """Return how many steps of one sequence, at most `most`, can be in flight without waiting for each other."""
        return most if self._beat is None else min(most, ceil(self.times.expect(1) / self._beat))

    def learn_ahead(self, tokens: int, seconds: float, followed: bool, streams: int, gain: Gain) -> None:
        """Record the result of a step of a sequence whose drafts run as steps of their own.

        The time saved is the difference to decoding without drafts. Without drafts, each request has one step in
        flight, and gets one token in the time of a step.

        Args:
            tokens: the number of tokens that the step brought: 1, or 0 if a wrong draft made the step void.
            seconds: time from the previous result, or from the start of this step if that was later.
            followed: True if the step was in flight when the previous result came.
            streams: the number of requests that run.
            gain: the judgement of the drafts' source, which is updated.
        """
        if followed:
            self._beat = (
                seconds
                if self._beat is None
                else self._beat + _FORGET * (min(seconds, _OUTLIER * self._beat) - self._beat)
            )
        for each in (self.others, self.model):
            each.pass_by(tokens)
        self._since_plain += _AHEAD * tokens
        gain.learn(tokens, tokens * self.times.expect(1) / streams - seconds)

    def continues(self, plain: int, drafted: Sequence[float], further: Sequence[float], spent: float) -> bool:
        """Return True if a step yields more tokens per second when a draft model first drafts further rows for it.

        Args:
            plain: the number of the step's rows that are not drafted.
            drafted: for each row drafted so far, the chance that it yields a token.
            further: the same for each row that would be drafted next.
            spent: seconds that the model took for the rows drafted so far.
        """
        rows, made = plain + len(drafted), plain + sum(drafted)
        if rows + len(further) > ROWS:
            return False
        longer = self.times.expect(rows + len(further)) + spent + self.drafting.expect(len(further), 0.0)
        return (made + sum(further)) / longer > made / (self.times.expect(rows) + spent)

    def rest(self) -> None:
        """Pause the draft model, which is too slow or too often wrong.

        Forget its speed after some pauses, so that it is measured again.
        """
        self.model.pause()
        self._rested += self.model.left
        if self._rested >= _LONGEST:
            self.drafting, self._rested = StepTimes(), 0

    def learn(self, plain: int, drafted: int, tokens: int, seconds: float, drafting: float | None = None) -> None:
        """Record a step of `plain` rows and `drafted` further ones, which brought `tokens` tokens together.

        `drafting` is the time in seconds that a draft model took before the step; None if none was used.
        """
        self.times.learn(plain + drafted, seconds)
        for gain in (self.others, self.model):
            gain.pass_by(plain)
        self._since_plain = self._since_plain + 1 if drafted else 0.0
        if drafted or drafting is not None:
            saved = tokens / plain * self.times.expect(plain) - seconds - (drafting or 0.0)
            (self.others if drafting is None else self.model).learn(tokens, saved)
