"""The choice of neurons that migrate next: greedy by importance, layer by layer, within the transfer window.

This is DynamicInfer's policy. Records from different places of the host's memory are gathered and sent as one copy,
because starting a copy takes longer than transferring a record. So a move fills adjacent slots: the run whose neurons
have the least importance.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.slots.table import F64, I32, SlotTable

I64 = npt.NDArray[np.int64]
LEAST_GAIN = 0.25  # importance, per moved neuron, that a move must gain to be worth its copy


@dataclass(frozen=True, eq=False)
class NeuronMove:
    """A move of `neurons`, int32 in any order, to as many adjacent slots from slot `first` on."""

    first: int
    neurons: I32

    @property
    def slots(self) -> slice:
        """The slots that the move fills."""
        return slice(self.first, self.first + len(self.neurons))


def choose_move(
    table: SlotTable[np.int32], values: F64, predicted: I32, room: int, least_gain: float = LEAST_GAIN
) -> NeuronMove | None:
    """Return the move that gains the most importance, or None if no move gains enough.

    The gain is the importance of the moved neurons, less that of the neurons in the overwritten slots.

    Args:
        table: the slots of the layer.
        values: the importance of every neuron, `[neurons]`.
        predicted: the neurons predicted for the current token; those without a slot may move.
        room: the most neurons that may move.
        least_gain: importance that each moved neuron must gain on average.
    """
    lacking = table.missing(predicted)
    lacking = lacking[np.argsort(-values[lacking], kind="stable")][: max(0, room)]
    gained = np.concatenate([[0.0], np.cumsum(values[lacking])])
    kept = np.where(table.unit_of >= 0, values[table.unit_of], 0.0)
    totals = np.concatenate([[0.0], np.cumsum(kept)])
    blocked = np.concatenate([[0], np.cumsum(~table.free)])
    found, best = None, 0.0
    for count in _counts(min(len(lacking), len(table) - table.fixed)):
        first, lost = _least_run(totals, blocked, count)
        gain = float(gained[count]) - lost - least_gain * count
        if gain > best:
            found, best = NeuronMove(first, lacking[:count]), gain
    return found


def _counts(most: int) -> list[int]:
    """Return the numbers of neurons to try as the size of a move: `most`, then a third fewer each time."""
    counts = []
    while most > 0:
        counts.append(most)
        most = most * 2 // 3
    return counts


def _least_run(totals: F64, blocked: I64, count: int) -> tuple[int, float]:
    """Return the first of the `count` adjacent movable slots with the least total importance, and that total.

    The total is infinite if no such run of slots exists. `totals` and `blocked`, `[slots + 1]`, are cumulative sums of
    importance and of slots that cannot be filled.
    """
    lost = np.where(blocked[count:] == blocked[:-count], totals[count:] - totals[:-count], np.inf)
    first = int(np.argmin(lost))
    return first, float(lost[first])
