"""Sums under way: a node starts a sum, and continues it when the result is needed.

An algorithm is a generator. It yields wherever it would wait for other nodes, so that its caller can compute.
"""

from collections.abc import Generator

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]

Exchange = Generator[None, None, F32]
"""A sum under way. It yields when it has sent all that it can before it has to wait, and returns the sum."""

IN_FLIGHT = 2  # most sums that may be under way at once


class PendingSum:
    """A sum that was started and may not have ended.

    `shape` is the shape of the partial result. `for_this_node` is True if this node gets the sum.
    """

    __slots__ = ("_exchange", "_total", "for_this_node", "shape")

    def __init__(self, exchange: Exchange, shape: tuple[int, ...], for_this_node: bool) -> None:
        self._exchange = exchange
        self._total: F32 | None = None
        self.shape = shape
        self.for_this_node = for_this_node

    def resume(self) -> F32 | None:
        """Continue the sum. Return its result, or None if it would now wait for other nodes."""
        if self._total is None:
            try:
                next(self._exchange)
            except StopIteration as done:
                self._total = done.value
        return self._total
