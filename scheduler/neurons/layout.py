"""What each layer has of the arena: how many slots, what lies there at first, and how much of that stays for good."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.model.neurons.problem import I32
from tpi.devices.pages import Bytes
from tpi.errors import PlanError
from tpi.partition import FFN_UNIT

F64 = npt.NDArray[np.float64]
FIXED = 0.5  # of a layer's slots: the hottest neurons stay; the others are replaced by importance


@dataclass(frozen=True, eq=False)
class ArenaLayer:
    """One layer.

    Attributes:
        name: what traces and errors call it.
        records: `[neurons, record_bytes]` uint8, all of its neurons in the host's memory.
        frequency: `[neurons]`, how often each is active, 0 to 1.
        hot: int32, the neurons that fill its slots at first, the hottest first.
        fixed: how many of them stay for good.
    """

    name: str
    records: Bytes
    frequency: F64
    hot: I32
    fixed: int = 0

    @property
    def neurons(self) -> int:
        """Of the layer."""
        return len(self.records)

    @property
    def slots(self) -> int:
        """As many as there are neurons at first."""
        return len(self.hot)

    @property
    def record_bytes(self) -> int:
        """Bytes of a slot."""
        return int(self.records.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of its slots."""
        return self.slots * self.record_bytes


def arena_layer(name: str, records: Bytes, frequency: F64, chosen: I32, fixed: float = FIXED) -> ArenaLayer:
    """A layer with the placement's `chosen` neurons, less the coolest that are beyond a whole number of units.

    Raises:
        PlanError: if there is no frequency for each neuron.
    """
    if len(frequency) != len(records):
        raise PlanError(f"{name} has {len(records)} neurons and a profile of {len(frequency)}; profile the model again")
    ordered = chosen[np.argsort(-frequency[chosen], kind="stable")]
    hot = ordered[: len(ordered) // FFN_UNIT * FFN_UNIT].astype(np.int32)
    return ArenaLayer(name, records, frequency, hot, int(fixed * len(hot)))


def arena_bytes(layers: Sequence[ArenaLayer]) -> int:
    """What all of them take."""
    return sum(layer.nbytes for layer in layers)
