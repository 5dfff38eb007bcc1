"""Belady's policy: what is used farthest in the future goes first. Nothing does better on a recorded run.

L. A. Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 5(2), 1966.
"""

from collections.abc import Sequence

import numpy as np

from scheduler.demand.policies import F64, Units


class Belady:
    """Knows the uses of a recorded run, in order; it has to hear of each of them, as `use`."""

    def __init__(self, units: int, uses: Sequence[Units]) -> None:
        self._next = np.full(units, np.inf)
        self._after: list[F64] = []  # of each use: when its units are used again
        for at in range(len(uses) - 1, -1, -1):
            self._after.append(self._next[uses[at]])
            self._next[uses[at]] = at

    def begin(self) -> None:
        """See `scheduler.demand.policies.Policy.begin`."""

    def expect(self, units: Units) -> None:
        """See `scheduler.demand.policies.Policy.expect`; it knows better."""

    def use(self, units: Units) -> None:
        """See `scheduler.demand.policies.Policy.use`."""
        self._next[units] = self._after.pop()

    def worth(self, units: Units) -> F64:
        """See `scheduler.demand.policies.Policy.worth`."""
        worth: F64 = -self._next[units]
        return worth
