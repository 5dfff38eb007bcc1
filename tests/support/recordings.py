"""Recordings of the units that an invented run uses."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import numpy as np

from scheduler.demand.choice.replay import Recording
from scheduler.demand.policies import Key
from scheduler.slots.table import Units


def record(keys: Sequence[Key], steps: Iterable[Sequence[Key]]) -> Recording:
    """Return the recording of a run over the units `keys`; `steps` has the used units of each step, in order.

    Consecutive units of one block are one use, in which a unit counts once.
    """
    numbers = {key: number for number, key in enumerate(keys)}

    def uses(step: Sequence[Key]) -> Iterator[Units]:
        for _, group in groupby(step, key=lambda key: key[0]):
            yield np.array([numbers[key] for key in dict.fromkeys(group)], np.int64)

    return Recording(np.array([block for block, _ in keys], np.int64), tuple(tuple(uses(step)) for step in steps))
