"""What it is worth to have a neuron on the accelerator: v = a + lambda f (DynamicInfer, design 2).

`a` is 1 where the prediction for the token under way names the neuron (the micro cache), `f` how often it was active of
late (the macro cache). `f` begins as the profile's, and each token counts half of itself after `HALF_LIFE` more.
"""

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
LAMBDA = 4.0  # a move costs a copy and is used by several tokens: habits weigh more than one prediction
HALF_LIFE = 24.0  # tokens: topics change with a paragraph


class NeuronWorth:
    """Of one layer's neurons."""

    def __init__(self, frequency: F64, weight: float = LAMBDA, half_life: float = HALF_LIFE) -> None:
        """`frequency` is `[neurons]`, from 0 to 1; `weight` is lambda."""
        self.frequency = frequency.astype(np.float64)
        self._weight, self._keep = weight, 0.5 ** (1.0 / half_life)

    def note(self, active: I32) -> None:
        """These were active for a token, each once."""
        self.frequency *= self._keep
        self.frequency[active] += 1.0 - self._keep

    def values(self, predicted: I32) -> F64:
        """`v` of every neuron, `[neurons]`, where `predicted` are named."""
        found: F64 = self._weight * self.frequency
        found[predicted] += 1.0
        return found
