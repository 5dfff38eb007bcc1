"""When all neurons of a block on the CPU are faster than the active ones on accelerator and CPU: by measured costs.

What is measured is a share: of how many neurons the CPU's sparse product takes as long as its product of all
(`worker.neurons.judge.measure_limit`), for steps of each size when the first comes. That is a ratio of two of its own
products, which other load on the CPU leaves as it is. So all neurons cost what so many cost by the line that is fitted
while steps of that size are computed, and fitted again when it drifts (`scheduler.neurons.costs`).
"""

from collections.abc import Callable
from math import inf

from scheduler.neurons.costs import LineCost
from scheduler.neurons.sizes import size_class

Lines = tuple[LineCost, LineCost]
"""Of the accelerator and of the CPU."""
ASKED_AGAIN = 32  # choices after which the two sides are measured once more, though all neurons were faster


class DenseFallback:
    """The choice for the blocks of one node; by one thread."""

    def __init__(self, limit: float | None = None) -> None:
        """`limit` is that share for a token; until it is known all are never computed for being faster."""
        self.dense = 0  # times that all were computed
        self._limits: dict[int, float] = {} if limit is None else {0: limit}
        self._since: dict[int, int] = {}  # by size, how often all were computed one after the other
        self._unasked: dict[tuple[int, int], int] = {}  # by layer and size where all were faster: steps since then

    @property
    def known(self) -> bool:
        """Whether that share was measured or given for one token."""
        return 0 in self._limits

    def learn(self, tokens: int, limit: float) -> None:
        """It is so much for steps of so many tokens."""
        self._limits[size_class(tokens)] = limit

    def limit(self, tokens: int, measure: Callable[[], float] | None = None) -> float:
        """That share for steps of so many tokens: as it is measured now, if none of about so many came before."""
        size, one = size_class(tokens), self._limits.get(0, inf)
        if size not in self._limits:
            if one == inf or measure is None:
                return one
            self._limits[size] = measure()
        return self._limits[size]

    def asks(self, layer: int, tokens: int) -> bool:
        """Whether to have a layer's neurons predicted for so many tokens; of one token, always.

        Where all were faster the last time, predicting the union of several tokens is time lost, but now and then.
        """
        at = (layer, size_class(tokens))
        if at not in self._unasked:
            return True
        self._unasked[at] += 1
        if self._unasked[at] > ASKED_AGAIN:
            del self._unasked[at]
        return at not in self._unasked

    def note(self, layer: int, tokens: int, paid: bool) -> None:
        """What came of asking for so many tokens."""
        if tokens > 1 and not paid:
            self._unasked[layer, size_class(tokens)] = 0

    def pays(self, there: int, here: int, neurons: int, lines: Lines | None, tokens: int = 1) -> bool:
        """Whether to compute `there` active neurons on the accelerator and `here` on the CPU, of `neurons` in all.

        `lines` is None where costs of such steps are not known yet: then the CPU's part alone decides.
        """
        size, everything = size_class(tokens), self.limit(tokens) * neurons
        if lines is None:
            paid = here <= everything
        else:
            accelerator, cpu = lines
            paid = max(accelerator.seconds(there), cpu.seconds(here)) <= cpu.seconds(everything)
        self._since[size] = 0 if paid else self._since.get(size, 0) + 1
        if self._since[size] > ASKED_AGAIN:
            self._since[size], paid = 0, True
        self.dense += not paid
        return paid
