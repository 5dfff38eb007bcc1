"""When all neurons of a block on the CPU are faster than the active ones on accelerator and CPU: by measured costs.

What was measured at the start is a share: of how many neurons the CPU's sparse product takes as long as its product of
all (`worker.neurons.judge.measure_limit`). That is a ratio of two of its own products, which other load on the CPU
leaves as it is. So all neurons cost what so many cost by the line that is fitted while tokens are computed, and fitted
again when it drifts (`scheduler.neurons.costs`).
"""

from math import inf

from scheduler.neurons.costs import LineCost

Lines = tuple[LineCost, LineCost]
"""Of the accelerator and of the CPU."""
ASKED_AGAIN = 32  # choices after which the two sides are measured once more, though all neurons were faster


class DenseFallback:
    """The choice for the blocks of one node; by one thread."""

    def __init__(self, limit: float = inf) -> None:
        """`limit` is that share; infinite where all neurons are never computed for being faster."""
        self.limit = limit
        self.dense = 0  # times that all were computed
        self._since = 0

    def pays(self, there: int, here: int, neurons: int, lines: Lines | None) -> bool:
        """Whether to compute `there` active neurons on the accelerator and `here` on the CPU, of `neurons` in all.

        `lines` is None where costs are not known yet, or are of other steps: then the CPU's part alone decides.
        """
        everything = self.limit * neurons
        if lines is None:
            paid = here <= everything
        else:
            accelerator, cpu = lines
            paid = max(accelerator.seconds(there), cpu.seconds(here)) <= cpu.seconds(everything)
        self._since = 0 if paid else self._since + 1
        if self._since > ASKED_AGAIN:
            self._since, paid = 0, True
        self.dense += not paid
        return paid
