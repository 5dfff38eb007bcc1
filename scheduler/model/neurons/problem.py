"""The placement problem: batches of 64 neurons with similar impact, and two units with measured bandwidths.

Symbols and equation numbers are those of PowerInfer, section 6.
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
BATCH = 64  # neurons in a batch (section 6.3.3)
_ROUNDED = 1e-9  # rounding error of a quotient, in neurons


@dataclass(frozen=True)
class ComputingUnit:
    """The CPU or the accelerator: its capacity `MCap` in bytes, and the bytes of weights that it reads per second."""

    capacity: int
    bandwidth: float


@dataclass(frozen=True, eq=False)
class LayerNeurons:
    """A layer: the frequency of each active neuron (`[neurons]`, 0 to 1), bytes of a neuron, bytes of the predictor."""

    frequency: F64
    neuron_bytes: int
    predictor_bytes: int = 0

    @cached_property
    def batches(self) -> tuple[I32, ...]:
        """The numbers of the layer's neurons, in batches of 64, the most active first; ties by number."""
        order = np.argsort(-self.frequency, kind="stable").astype(np.int32)
        return tuple(order[at : at + BATCH] for at in range(0, len(order), BATCH))

    @cached_property
    def impacts(self) -> F64:
        """The impact `v` of each batch: the mean number of its neurons that are active (equation 1)."""
        return np.array([self.frequency[batch].sum() for batch in self.batches])

    @property
    def predictor_impact(self) -> float:
        """The impact of the predictor: that of neurons that have as many bytes and are active for every token."""
        return self.predictor_bytes / self.neuron_bytes


@dataclass(frozen=True)
class NeuronProblem:
    """The layers, the two units, and the seconds of one exchange between them.

    Raises:
        PlanError: if a bandwidth is not positive, a figure is not finite, or a layer has no neurons.
    """

    layers: Sequence[LayerNeurons]
    cpu: ComputingUnit
    accelerator: ComputingUnit
    sync: float

    def __post_init__(self) -> None:
        rates = (self.cpu.bandwidth, self.accelerator.bandwidth)
        if not all(math.isfinite(rate) and rate > 0 for rate in rates) or not 0 <= self.sync < math.inf:
            raise PlanError("a measured bandwidth or exchange time is not valid; measure again with --remeasure")
        if not self.layers or any(layer.neuron_bytes < 1 or not len(layer.frequency) for layer in self.layers):
            raise PlanError("a layer has no neurons to place; run `tpi profile` again")

    @classmethod
    def of(
        cls, layers: Sequence[LayerNeurons], machine: NodeMachine, taken: int = 0, taken_there: int = 0
    ) -> "NeuronProblem":
        """Return the problem for a machine.

        Two copies and two calls make one exchange: the input goes to the accelerator, the result comes back, and each
        side starts one call.

        Args:
            layers: the neurons of each layer.
            machine: the measured machine.
            taken: bytes of RAM that are not available.
            taken_there: bytes of the accelerator's memory that are not available.

        Raises:
            PlanError: if the machine has no accelerator, or a figure is not valid.
        """
        device = machine.accelerator
        if device is None:
            raise PlanError("this node has no accelerator to share neurons with; name one with --device")
        sync = 2 * device.link.latency + device.rates.start + machine.host.start
        return cls(
            layers, ComputingUnit(machine.memory - taken, machine.host.read),
            ComputingUnit(device.memory - taken_there, device.rates.read), sync,
        )  # fmt: skip

    @cached_property
    def least(self) -> tuple[int | None, ...]:
        """The fewest neurons `C` of each layer on the accelerator that are worth an exchange; None if no number is.

        These are equations 4 and 5: the neurons must save at least as many seconds as one exchange takes.
        """
        return tuple(self._least(layer) for layer in self.layers)

    def _least(self, layer: LayerNeurons) -> int | None:
        gain = layer.neuron_bytes / self.cpu.bandwidth - layer.neuron_bytes / self.accelerator.bandwidth
        if gain < 0 or self.sync > gain * (len(layer.frequency) + _ROUNDED):
            return None
        return max(1, math.ceil(self.sync / gain - _ROUNDED)) if self.sync else 1
