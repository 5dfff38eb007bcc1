"""The comparison of two ways to run short steps in the same memory: the plain window, and neurons on demand.

Both ways take turns of several steps each, since a change takes about as long as one step. The time of a step is
measured from its start to the end of its last feed-forward block: the window waits in its holds, neurons on demand wait
in their blocks. One size of steps is compared at a time, the most frequent one. When another size becomes the most
frequent, it gets its own comparison.
"""

from collections import Counter, deque
from statistics import median
from time import perf_counter

from scheduler.neurons.sizes import size_class, size_name
from worker.neurons.judge import SHORT, SparsityJudge

TURN, WARM, TURNS_EACH = 8, 3, 2  # steps of a turn; steps at its start that are not timed; turns of each way


class TurnsJudge(SparsityJudge):
    """The judge that runs short steps in two ways in turn, and then picks the faster one.

    One way is the plain window, the other is neurons on demand. One thread uses the judge. All nodes of a group count
    the same steps, so they change over together.
    """

    def __init__(self) -> None:
        super().__init__("auto")
        self.size = 0  # size class of the steps that are compared, or were compared last
        self.token = 0  # number of steps of this size so far
        self._paid: dict[int, bool] = {}  # by size class, True if neurons on demand were faster
        self._timed: dict[tuple[int, bool], list[float]] = {}  # seconds, by size class and `by_neurons`
        self._lately: deque[int] = deque(maxlen=TURN)  # size classes of the last short steps
        self._began = self._ended = 0.0
        self._tokens = 0

    @property
    def by_neurons(self) -> bool:
        """True if the next step, of any length, uses neurons on demand."""
        return self._paid.get(self.size, self.token // TURN % 2 == 1)

    def predicts(self, tokens: int) -> bool:
        """Return True if this step predicts neurons, which it does while the memory holds slots and not the window."""
        return self.by_neurons

    def predicting_is_faster(self, tokens: int = 1) -> bool | None:
        """Return True if neurons on demand were faster for steps of `tokens` tokens; None if that is not known yet."""
        return self._paid.get(size_class(tokens))

    def begin(self) -> None:
        """Record the time of the previous short step, if any, and start a new one."""
        if self._ended:
            self._count(size_class(self._tokens))
        self.start()

    def abandon(self) -> None:
        """Discard the time of the present step, because the step failed."""
        self.start()

    def faster(self) -> bool:
        """Return True if, among the compared steps, the median step was faster with neurons on demand."""
        return median(self._timed[self.size, True]) < median(self._timed[self.size, False])

    def start(self) -> None:
        """Start the clock of a step; the time of a change-over before it is not included."""
        self._began, self._ended = perf_counter(), 0.0

    def note(self, seconds: float, tokens: int) -> None:
        """Record the time at which a block of a step of `tokens` tokens ended. `seconds` is not used."""
        if tokens <= SHORT:
            self._ended, self._tokens = perf_counter(), tokens

    def describe(self) -> str:
        """Return a sentence on which share of neurons was skipped, and on the measured times of each size of steps."""
        said = [_said(size, *self._medians(size)) for size in sorted(self._paid)]
        if said and not any(self._paid.values()):
            return f"sparsity is off, it does not pay here: {'; '.join(said)}"
        return "; ".join(filter(None, [self.skipped(trying=not said), *said]))

    def _count(self, size: int) -> None:
        """Count a finished short step of the size class `size`.

        Pick the faster way when both have had all of their turns.

        If another size has become the most frequent lately, compare steps of that size from now on.
        """
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
    return f"{step} takes {plain:.1f} ms with all neurons and {by_neurons:.1f} ms with the predicted ones"
