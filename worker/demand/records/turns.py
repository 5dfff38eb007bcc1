"""Whether reading by neurons pays: some steps with the plain window, some by neurons, in the same memory.

What is timed is a short step from its beginning to its last feed-forward block, since a window makes its holds wait and
records make their blocks wait. Turns are of several steps, as changing over takes about one. One size of steps is
compared at a time, the one that comes most often; when that becomes another one, it has turns of its own.
"""

from collections import Counter, deque
from statistics import median
from time import perf_counter

from scheduler.neurons.sizes import size_class, size_name
from worker.neurons.judge import SHORT, Judge

TURN, WARM, TURNS_EACH = 8, 3, 2  # steps of a turn, those of them that do not count, turns of each kind


class TurnsJudge(Judge):
    """See the module's docstring; by one thread. All nodes of a group count the same steps, and so turn together."""

    def __init__(self) -> None:
        super().__init__("auto")
        self.size = 0  # of the steps that are compared, or were
        self.token = 0  # of those that are compared
        self._paid: dict[int, bool] = {}  # by size
        self._timed: dict[tuple[int, bool], list[float]] = {}  # seconds, by size and whether it was by neurons
        self._lately: deque[int] = deque(maxlen=TURN)  # sizes
        self._began = self._ended = 0.0
        self._tokens = 0

    @property
    def by_neurons(self) -> bool:
        """Whether the next step is read by neurons, however long it is."""
        return self._paid.get(self.size, self.token // TURN % 2 == 1)

    def predicts(self, tokens: int) -> bool:
        """See `Judge.predicts`: in memory that is the window's nothing is read by neurons."""
        return self.by_neurons

    def pays(self, tokens: int = 1) -> bool | None:
        """See `Judge.pays`."""
        return self._paid.get(size_class(tokens))

    def begin(self) -> None:
        """See `Judge.begin`."""
        if self._ended:
            self._count(size_class(self._tokens))
        self.start()

    def abandon(self) -> None:
        """See `Judge.abandon`."""
        self.start()

    def faster(self) -> bool:
        """Whether steps of the size that is compared took less by neurons."""
        return median(self._timed[self.size, True]) < median(self._timed[self.size, False])

    def start(self) -> None:
        """The step begins in earnest: what was changed over before it does not count."""
        self._began, self._ended = perf_counter(), 0.0

    def note(self, seconds: float, tokens: int) -> None:
        """See `Judge.note`: a block ended just now."""
        if tokens <= SHORT:
            self._ended, self._tokens = perf_counter(), tokens

    def describe(self) -> str:
        """See `Judge.describe`."""
        said = [_said(size, *self._medians(size)) for size in sorted(self._paid)]
        if said and not any(self._paid.values()):
            return f"sparsity is off, it does not pay here: {'; '.join(said)}"
        return "; ".join(filter(None, [self.skipped(trying=not said), *said]))

    def _count(self, size: int) -> None:
        """A short step is over."""
        self._lately.append(size)
        if size == self.size and size not in self._paid:
            if self.token % TURN >= WARM:
                self._timed.setdefault((size, self.by_neurons), []).append(self._ended - self._began)
            self.token += 1
            if self.token == 2 * TURNS_EACH * TURN:
                self._paid[size] = self.faster()
        usual, times = Counter(self._lately).most_common(1)[0]
        if usual != self.size and (2 * times > TURN or (len(self._lately) == TURN and self.size not in self._lately)):
            self.size, self.token = usual, 0

    def _medians(self, size: int) -> tuple[float, float]:
        plain, by_neurons = (1e3 * median(self._timed[size, way]) for way in (False, True))
        return plain, by_neurons


def _said(size: int, plain: float, by_neurons: float) -> str:
    step = f"a step of {size_name(size)}" if size else "a token"
    return f"{step} takes {plain:.1f} ms with all neurons and {by_neurons:.1f} ms with those that are predicted"
