"""A layer's part of the arena: the number of slots, the neurons that fill them at first, and how many never move."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.model.neurons.problem import I32
from tpi.devices.pages import Bytes
from tpi.errors import PlanError
from tpi.partition import FFN_UNIT

F64 = npt.NDArray[np.float64]
FIXED = 0.5  # share of a layer's slots whose neurons, the hottest, are never replaced


@dataclass(frozen=True, eq=False)
class ArenaLayer:
    """One layer's neurons and its slots in the arena.

    Attributes:
        name: the layer's name in traces and errors.
        records: `[neurons, record_bytes]` uint8, all of its neurons in the host's memory.
        frequency: `[neurons]`, the share of tokens for which each neuron is active, 0 to 1.
        hot: int32, the neurons that fill its slots at first, the most frequently active first.
        fixed: number of `hot` neurons that are never replaced.
    """

    name: str
    records: Bytes
    frequency: F64
    hot: I32
    fixed: int = 0

    @property
    def neurons(self) -> int:
        """Number of neurons of the layer."""
        return len(self.records)

    @property
    def slots(self) -> int:
        """Number of slots, each of which one hot neuron fills at first."""
        return len(self.hot)

    @property
    def record_bytes(self) -> int:
        """Size of a slot in bytes."""
        return int(self.records.shape[1])

    @property
    def nbytes(self) -> int:
        """Size of all slots in bytes."""
        return self.slots * self.record_bytes


def arena_layer(name: str, records: Bytes, frequency: F64, chosen: I32, fixed: float = FIXED) -> ArenaLayer:
    """Return a layer whose slots hold the neurons `chosen` at first.

    The number of slots is rounded down to a multiple of `FFN_UNIT`; the least active of `chosen` are left out.

    Args:
        name: the layer's name in traces and errors.
        records: all of its neurons, `[neurons, record_bytes]` uint8.
        frequency: the share of tokens for which each neuron is active, `[neurons]`.
        chosen: the neurons to place on the accelerator, in any order.
        fixed: the share of the slots, those of the most active neurons, that are never replaced.

    Raises:
        PlanError: if `frequency` does not have one value for each neuron.
    """
    if len(frequency) != len(records):
        raise PlanError(f"{name} has {len(records)} neurons, its profile {len(frequency)}; run `tpi profile` again")
    ordered = chosen[np.argsort(-frequency[chosen], kind="stable")]
    hot = ordered[: len(ordered) // FFN_UNIT * FFN_UNIT].astype(np.int32)
    return ArenaLayer(name, records, frequency, hot, int(fixed * len(hot)))


def arena_bytes(layers: Sequence[ArenaLayer]) -> int:
    """Return the bytes that the slots of all `layers` take."""
    return sum(layer.nbytes for layer in layers)
