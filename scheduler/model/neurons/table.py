"""Neuron tables: which neuron of a layer is at which place on its unit (PowerInfer, section 5.2)."""

from dataclasses import dataclass

import numpy as np

from scheduler.model.neurons.problem import I32


@dataclass(frozen=True, eq=False)
class NeuronTable:
    """`accelerator` and `cpu` hold the numbers of a layer's neurons by their places there, in order; int32."""

    accelerator: I32
    cpu: I32

    @classmethod
    def of(cls, neurons: int, accelerator: I32) -> "NeuronTable":
        """From the neurons on the accelerator, in any order; the CPU has the others of `neurons`."""
        marks = np.zeros(neurons, bool)
        marks[accelerator] = True
        return cls(np.flatnonzero(marks).astype(np.int32), np.flatnonzero(~marks).astype(np.int32))

    @property
    def places(self) -> I32:
        """For each neuron its place on its unit: `p` on the accelerator, `-1 - p` on the CPU; `[neurons]` int32."""
        found = np.empty(len(self.accelerator) + len(self.cpu), np.int32)
        found[self.accelerator] = np.arange(len(self.accelerator))
        found[self.cpu] = -1 - np.arange(len(self.cpu))
        return found

    def split(self, active: I32) -> tuple[I32, I32]:
        """The places of active neurons on the accelerator, and on the CPU."""
        places = self.places[active]
        return places[places >= 0], -1 - places[places < 0]
