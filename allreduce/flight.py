"""Sums under way: what a node has started, and goes on with when it needs the result.

An algorithm is a generator that yields wherever it would wait for others, so that its caller computes meanwhile.
"""

from collections.abc import Generator

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]

Exchange = Generator[None, None, F32]
"""A sum under way: it yields when it has sent all that it can before it waits for others, and returns the sum."""

IN_FLIGHT = 2  # sums that may be started before the first of them is finished


class Flight:
    """A sum that was started: of partials of this `shape`, and whether its result is for `here`."""

    __slots__ = ("_exchange", "_total", "here", "shape")

    def __init__(self, exchange: Exchange, shape: tuple[int, ...], here: bool) -> None:
        self._exchange = exchange
        self._total: F32 | None = None
        self.shape = shape
        self.here = here

    def resume(self) -> F32 | None:
        """The sum, or None if it has sent something and would wait for others again."""
        if self._total is None:
            try:
                next(self._exchange)
            except StopIteration as done:
                self._total = done.value
        return self._total
