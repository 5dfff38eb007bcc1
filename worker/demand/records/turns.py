"""Whether reading by neurons pays: some tokens with the plain window, some by neurons, in the same memory.

What is timed is a token from its beginning to its last feed-forward block, since a window makes its holds wait and
records make their blocks wait. Turns are of several tokens, as changing over takes about one.
"""

from statistics import median
from time import perf_counter

from worker.neurons.judge import Judge

TURN, WARM, TURNS_EACH = 8, 3, 2  # tokens of a turn, those of them that do not count, turns of each kind


class TurnsJudge(Judge):
    """See the module's docstring; by one thread. All nodes of a group count the same tokens, and so turn together."""

    def __init__(self) -> None:
        super().__init__("auto")
        self.token = 0  # of those that are compared
        self._timed: dict[bool, list[float]] = {False: [], True: []}  # seconds, by whether it was by neurons
        self._began = self._ended = 0.0

    @property
    def predicts(self) -> bool:
        """See `Judge.predicts`."""
        return self.token // TURN % 2 == 1 if self.pays is None else self.pays

    def begin(self) -> None:
        """See `Judge.begin`."""
        if self._ended and self.pays is None:
            if self.token % TURN >= WARM:
                self._timed[self.predicts].append(self._ended - self._began)
            self.token += 1
            if self.token == 2 * TURNS_EACH * TURN:
                self.pays = self.faster()
        self.start()

    def faster(self) -> bool:
        """Whether a token took less by neurons."""
        return median(self._timed[True]) < median(self._timed[False])

    def start(self) -> None:
        """The step begins in earnest: what was changed over before it does not count."""
        self._began, self._ended = perf_counter(), 0.0

    def note(self, seconds: float, tokens: int) -> None:
        """See `Judge.note`: a block ended just now."""
        if tokens == 1:
            self._ended = perf_counter()

    def describe(self) -> str:
        """See `Judge.describe`."""
        if self.pays is None:
            return super().describe()
        plain, by_neurons = (1e3 * median(self._timed[way]) for way in (False, True))
        found = f"a token takes {plain:.1f} ms with all neurons and {by_neurons:.1f} ms with those that are predicted"
        if not self.pays:
            return f"sparsity is off, it does not pay here: {found}"
        return f"{super().describe()}; {found}"
