"""The value of having a neuron on the accelerator: v = a + lambda f (DynamicInfer, design 2).

`a` is 1 if the prediction for the current token names the neuron (the micro cache), else 0. `f` is its recent frequency
(the macro cache): it starts at the profile's value, and a token's weight halves every `HALF_LIFE` tokens.
"""

import numpy as np

from scheduler.slots.table import F64, I32

LAMBDA = 4.0  # several tokens use a moved neuron, so its frequency weighs more than one prediction
HALF_LIFE = 24.0  # tokens: topics change with a paragraph


class NeuronImportance:
    """The value of having each neuron of a layer on the accelerator, v = a + lambda f."""

    def __init__(self, frequency: F64, weight: float = LAMBDA, half_life: float = HALF_LIFE) -> None:
        """Start from `frequency` `[neurons]`, 0 to 1; `weight` is lambda, `half_life` is in tokens."""
        self.frequency = frequency.astype(np.float64)
        self._weight, self._keep = weight, 0.5 ** (1.0 / half_life)

    def update(self, active: I32) -> None:
        """Update the frequencies of all neurons with `active`, the unique neurons that were active for one token."""
        self.frequency *= self._keep
        self.frequency[active] += 1.0 - self._keep

    def priority(self, neurons: I32) -> F64:
        """Return the value v of each of `neurons`, none of which is predicted for the current token."""
        found: F64 = self._weight * self.frequency[neurons]
        return found

    def values(self, predicted: I32) -> F64:
        """Return the value v of every neuron, float64 `[neurons]`; `predicted` are the current token's neurons."""
        found: F64 = self._weight * self.frequency
        found[predicted] += 1.0
        return found
