"""Thresholds for models whose activations are small but not 0 (SwiGLU): which neurons are left out.

The gate is computed first. A neuron counts for |activation of the gate| times the length of its column of down: what it
could add to the result if up were 1 (CATS takes the activation alone, WINA the length too). Below its layer's threshold
it is skipped, and with it its rows of up and its column of down. `tpi.sparsity.gates` measures what that costs.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tpi.sparsity.replay import FfnWeights

F32 = npt.NDArray[np.float32]
NAME = "gates.npz"  # in the pack's directory, what `tpi.sparsity.gates` measured
DEFAULT_ERROR = 0.04  # SmolLM2-135M: perplexity within 2%


@dataclass(frozen=True)
class LayerThreshold:
    """What is skipped in a layer: neurons that count for less than `threshold`; `skipped` is their share, `error` the
    relative error that was measured with it."""

    threshold: float
    skipped: float
    error: float


@dataclass(frozen=True)
class Thresholds:
    """One threshold a layer, and the error that was asked for."""

    error: float
    layers: tuple[LayerThreshold, ...]

    @property
    def skipped(self) -> float:
        """The share of all neurons that is skipped."""
        return float(np.mean([layer.skipped for layer in self.layers]))

    def feed_forward(self, layer: int, weights: "FfnWeights", x: F32) -> F32:
        """A `tpi.sparsity.replay.FeedForward` that skips what is below the layer's threshold."""
        return above(weights, x, self.layers[layer].threshold)


def importance(weights: "FfnWeights", x: F32) -> F32:
    """What each neuron counts for, `[tokens, neurons]`, of `x` `[tokens, hidden]` normed."""
    return np.abs(weights.gated(x)) * weights.down_norms


def above(weights: "FfnWeights", x: F32, threshold: float) -> F32:
    """What the neurons that count for `threshold` or more come to: `[tokens, hidden]`."""
    return masked(weights, x, importance(weights, x) >= np.float32(threshold))


def masked(weights: "FfnWeights", x: F32, active: npt.NDArray[np.bool_]) -> F32:
    """What the active neurons, `[tokens, neurons]`, come to: `[tokens, hidden]`."""
    return np.asarray(np.where(active, weights.inner(x), np.float32(0)) @ weights.down, np.float32)
