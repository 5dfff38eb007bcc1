"""The choice between two ways to compute a block: all neurons on the CPU, or active ones on accelerator and CPU.

For each size of steps, `worker.neurons.judge.measure_limit` measures the *limit*: the share of neurons whose sparse
product on the CPU takes as long as the product of all neurons. The limit is a ratio of two times on the CPU, so it
hardly depends on other load. To compute all neurons then costs as much as this share of active neurons does by the
fitted costs (`scheduler.neurons.costs`).
"""

from collections.abc import Callable
from math import inf

from scheduler.neurons.costs import LineCost
from scheduler.neurons.sizes import size_class

Lines = tuple[LineCost, LineCost]
"""The fitted costs of n neurons on the accelerator and on the CPU."""
ASKED_AGAIN = 32  # choices of all neurons after which active ones are tried once more


class DenseFallback:
    """The choice for each block of one node: all neurons on the CPU, or active neurons on both sides.

    A limit is the share of active neurons above which computing all neurons on the CPU is faster. Only one thread uses
    the object.
    """

    def __init__(self, limit: float | None = None) -> None:
        """Create a choice. `limit` is the limit for steps of one token; None: unknown until `learn` sets it.

        While no limit is known, `prefers_active` always returns True.
        """
        self.dense = 0  # number of times that all neurons were computed
        self._limits: dict[int, float] = {} if limit is None else {0: limit}
        self._since: dict[int, int] = {}  # by size, consecutive choices of all neurons
        # by layer and size: steps without a prediction since computing all neurons was faster
        self._unasked: dict[tuple[int, int], int] = {}

    @property
    def known(self) -> bool:
        """True if the limit for one token is known."""
        return 0 in self._limits

    def learn(self, tokens: int, limit: float) -> None:
        """Set the `limit` for steps of about `tokens` tokens."""
        self._limits[size_class(tokens)] = limit

    def limit(self, tokens: int, measure: Callable[[], float] | None = None) -> float:
        """Return the limit for steps of about `tokens` tokens; call `measure` to get it if this size has none yet."""
        size, one = size_class(tokens), self._limits.get(0, inf)
        if size not in self._limits:
            if one == inf or measure is None:
                return one
            self._limits[size] = measure()
        return self._limits[size]

    def should_predict(self, layer: int, tokens: int) -> bool:
        """Return True if a layer's neurons should be predicted in a step of `tokens` tokens; always True for one token.

        If computing all neurons was faster the last time, predict only every `ASKED_AGAIN` steps.
        """
        at = (layer, size_class(tokens))
        if at not in self._unasked:
            return True
        self._unasked[at] += 1
        if self._unasked[at] > ASKED_AGAIN:
            del self._unasked[at]
        return at not in self._unasked

    def note(self, layer: int, tokens: int, paid: bool) -> None:
        """Record for `should_predict` whether computing only active neurons was faster (`paid`) in a layer."""
        if tokens > 1 and not paid:
            self._unasked[layer, size_class(tokens)] = 0

    def prefers_active(self, there: int, here: int, neurons: int, lines: Lines | None, tokens: int = 1) -> bool:
        """Return True if a block should compute its active neurons on both sides, and not all neurons on the CPU.

        After `ASKED_AGAIN` results of False in a row for steps of this size, return True once, to measure again.

        Args:
            there: the number of active neurons on the accelerator.
            here: the number of active neurons on the CPU.
            neurons: the number of all neurons of the block.
            lines: the fitted costs of both sides in such steps. None: compare only `here` with the limit.
            tokens: the number of tokens of the step.
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
