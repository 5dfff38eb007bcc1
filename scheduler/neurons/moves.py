"""Which neurons migrate next: greedy by importance, layer by layer, within the transfer window (DynamicInfer).

Records that lie apart in the host's memory are gathered and go in one copy, because a copy takes longer to begin than a
record takes to cross. So they need slots side by side: those that hold the least.
"""

import numpy as np
import numpy.typing as npt

from scheduler.neurons.slots import F64, I32, NeuronMove, NeuronSlots

I64 = npt.NDArray[np.int64]
LEAST_GAIN = 0.25  # of importance for each neuron: below that a move is not worth its copy


def choose_move(
    slots: NeuronSlots, values: F64, predicted: I32, room: int, least_gain: float = LEAST_GAIN
) -> NeuronMove | None:
    """The move that gains the most importance, of at most `room` neurons; None: none gains enough.

    `values` is the importance of every neuron, `[neurons]`; what moves is `predicted` and has no slot.
    """
    lacking = predicted[slots.slot_of[predicted] < 0]
    lacking = lacking[np.argsort(-values[lacking], kind="stable")][: max(0, room)]
    gained = np.concatenate([[0.0], np.cumsum(values[lacking])])
    kept = np.where(slots.neuron_of >= 0, values[slots.neuron_of], 0.0)
    worth = np.concatenate([[0.0], np.cumsum(kept)])
    blocked = np.concatenate([[0], np.cumsum(~slots.movable)])
    found, best = None, 0.0
    for count in _counts(min(len(lacking), len(slots) - slots.fixed)):
        first, lost = _least_run(worth, blocked, count)
        gain = float(gained[count]) - lost - least_gain * count
        if gain > best:
            found, best = NeuronMove(first, lacking[:count]), gain
    return found


def _counts(most: int) -> list[int]:
    """How many could move: all, and ever fewer by a third."""
    counts = []
    while most > 0:
        counts.append(most)
        most = most * 2 // 3
    return counts


def _least_run(worth: F64, blocked: I64, count: int) -> tuple[int, float]:
    """The first of `count` movable slots side by side whose neurons are worth the least, and how much; or infinity.

    `worth` and `blocked` are sums up to each slot, `[slots + 1]`: of importance, and of slots that cannot be filled.
    """
    lost = np.where(blocked[count:] == blocked[:-count], worth[count:] - worth[:-count], np.inf)
    first = int(np.argmin(lost))
    return first, float(lost[first])
