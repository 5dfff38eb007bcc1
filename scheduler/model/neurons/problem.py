"""What is to be placed: batches of 64 neurons with like impact, on two units with measured bandwidths.

Symbols and numbers of equations are those of PowerInfer, section 6.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from scheduler.model.machine import NodeMachine
from tpi.errors import PlanError

F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
BATCH = 64  # neurons, section 6.3.3
_ROUNDED = 1e-9  # neurons that a quotient may be off by


@dataclass(frozen=True)
class ComputingUnit:
    """The CPU or the accelerator: `MCap` in bytes, and bytes of weights that it reads in a second."""

    capacity: int
    bandwidth: float


@dataclass(frozen=True, eq=False)
class LayerNeurons:
    """A layer: how often each neuron is active, `[neurons]` from 0 to 1, the bytes of one, and of the predictor."""

    frequency: F64
    neuron_bytes: int
    predictor_bytes: int = 0

    @cached_property
    def batches(self) -> tuple[I32, ...]:
        """Its neurons, the most active first, 64 at a time; equal ones in order."""
        order = np.argsort(-self.frequency, kind="stable").astype(np.int32)
        return tuple(order[at : at + BATCH] for at in range(0, len(order), BATCH))

    @cached_property
    def impacts(self) -> F64:
        """`v` of each batch: the neurons that are active in it (equation 1)."""
        return np.array([self.frequency[batch].sum() for batch in self.batches])

    @property
    def predictor_impact(self) -> float:
        """It is read for every token: as much as that many bytes of neurons which are always active."""
        return self.predictor_bytes / self.neuron_bytes


@dataclass(frozen=True)
class NeuronProblem:
    """Layers, the two units, and the seconds of one exchange between them.

    Raises:
        PlanError: if a figure is no amount that can be, such as a bandwidth of 0.
    """

    layers: Sequence[LayerNeurons]
    cpu: ComputingUnit
    accelerator: ComputingUnit
    sync: float

    def __post_init__(self) -> None:
        rates = (self.cpu.bandwidth, self.accelerator.bandwidth)
        if not all(math.isfinite(rate) and rate > 0 for rate in rates) or not 0 <= self.sync < math.inf:
            raise PlanError("a bandwidth or an exchange that was measured is no amount; measure the machine again")
        if not self.layers or any(layer.neuron_bytes < 1 or not len(layer.frequency) for layer in self.layers):
            raise PlanError("a layer without neurons cannot be placed; profile the model again")

    @classmethod
    def of(
        cls, layers: Sequence[LayerNeurons], machine: NodeMachine, taken: int = 0, taken_there: int = 0
    ) -> "NeuronProblem":
        """With what was measured of a machine, of whose memories so many bytes are taken: RAM, the accelerator's.

        One exchange brings the input there and the result back, and starts one call on each side.

        Raises:
            PlanError: if the machine has no accelerator, or a figure is no amount.
        """
        device = machine.accelerator
        if device is None:
            raise PlanError("neurons are placed between a CPU and an accelerator; name one with --device")
        sync = 2 * device.link.latency + device.rates.start + machine.host.start
        return cls(
            layers, ComputingUnit(machine.memory - taken, machine.host.read),
            ComputingUnit(device.memory - taken_there, device.rates.read), sync,
        )  # fmt: skip

    @cached_property
    def least(self) -> tuple[int | None, ...]:
        """`C` of each layer: the fewest neurons that repay an exchange (4, 5); None: no number of them does."""
        return tuple(self._least(layer) for layer in self.layers)

    def _least(self, layer: LayerNeurons) -> int | None:
        gain = layer.neuron_bytes / self.cpu.bandwidth - layer.neuron_bytes / self.accelerator.bandwidth
        if gain < 0 or self.sync > gain * len(layer.frequency):
            return None
        return max(1, math.ceil(self.sync / gain - _ROUNDED)) if self.sync else 1
