"""Thresholds for models whose activations are small but not 0 (SwiGLU): which neurons are left out at what error.

The gate is computed first. A neuron counts for |activation of the gate| times the length of its column of down: what it
could add to the result if up were 1 (CATS takes the activation alone, WINA the length too). Below its layer's threshold
it is skipped, and with it its rows of up and its column of down. The threshold is the largest at which what is left out
has at most a stated share of the length of the layer's result: of each token's own, in root mean square over the tokens
of a text (a few tokens have results a hundred times as long as all others), with the layers before already thresholded.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tpi.errors import ModelError
from tpi.kernels import Kernels
from tpi.pack.reader import Pack
from tpi.sources.files import parse_json
from tpi.sparsity.replay import FeedForward, FfnWeights, replay
from tpi.system.atomic import write_atomically

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
NAME = "thresholds.json"  # in the pack's directory
VERSION = 1
DEFAULT_ERROR = 0.04  # SmolLM2-135M: perplexity within 2%
_STEPS = 40  # shares of skipped neurons that are tried
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class LayerThreshold:
    """What is skipped in a layer: neurons that count for less than `threshold`; `skipped` is their share, `error` the
    relative error that was measured with it."""

    threshold: float
    skipped: float
    error: float


@dataclass(frozen=True)
class Thresholds:
    """One threshold a layer, the error that was asked for, and how many tokens they were measured on."""

    error: float
    tokens: int
    layers: tuple[LayerThreshold, ...]

    @property
    def skipped(self) -> float:
        """The share of all neurons that is skipped."""
        return float(np.mean([layer.skipped for layer in self.layers]))

    def feed_forward(self, layer: int, weights: FfnWeights, x: F32) -> F32:
        """A `FeedForward` that skips what is below the layer's threshold."""
        return masked(weights, x, importance(weights, x) >= np.float32(self.layers[layer].threshold))


def importance(weights: FfnWeights, x: F32) -> F32:
    """What each neuron counts for, `[tokens, neurons]`, of `x` `[tokens, hidden]` normed."""
    return np.abs(weights.gated(x)) * weights.down_norms


def masked(weights: FfnWeights, x: F32, active: npt.NDArray[np.bool_]) -> F32:
    """What the active neurons, `[tokens, neurons]`, come to: `[tokens, hidden]`."""
    return np.asarray(np.where(active, weights.inner(x), np.float32(0)) @ weights.down, np.float32)


def threshold_of(weights: FfnWeights, x: F32, error: float) -> LayerThreshold:
    """The largest threshold, among those that skip 1/40, 2/40, ... of the neurons of `x`, within `error`.

    Raises:
        ModelError: unless `error` is from 0 to 1.
    """
    if not 0 <= error < 1:
        raise ModelError(f"an error of {error} is not possible; give a share from 0 to 1, such as {DEFAULT_ERROR}")
    counts, inner = importance(weights, x), weights.inner(x)
    sizes = np.maximum(np.linalg.norm(inner @ weights.down, axis=1), np.float32(1e-30))
    best = LayerThreshold(0.0, float(np.mean(counts < 0)), 0.0)
    low, high = 0, _STEPS
    while high - low > 1:  # the error grows with what is skipped
        middle = (low + high) // 2
        threshold = float(np.quantile(counts, middle / _STEPS))
        left_out = counts < np.float32(threshold)
        lost = np.linalg.norm(np.where(left_out, inner, 0) @ weights.down, axis=1) / sizes
        measured = float(np.sqrt(np.mean(np.square(lost))))
        if measured <= error:
            low, best = middle, LayerThreshold(threshold, float(np.mean(left_out)), measured)
        else:
            high = middle
    return best


def calibrate(pack: Pack, tokens: I32, kernels: Kernels, error: float = DEFAULT_ERROR) -> Thresholds:
    """The thresholds of a model, measured on `tokens` `[sequences, length]`.

    Raises:
        ModelError: if `error` is no share, or the model has other blocks than attention and feed-forward.
    """
    found: list[LayerThreshold] = []

    def measure(layer: int, weights: FfnWeights, x: F32) -> F32:
        found.append(threshold_of(weights, x, error))
        return masked(weights, x, importance(weights, x) >= np.float32(found[-1].threshold))

    chosen: FeedForward = measure
    replay(pack, tokens, kernels, chosen)
    return Thresholds(error, tokens.size, tuple(found))


def save_thresholds(path: Path, thresholds: Thresholds) -> None:
    """Write them as JSON, the file as a whole or not at all."""
    write_atomically(path, json.dumps({"version": VERSION, **asdict(thresholds)}, indent=1).encode())


def load_thresholds(path: Path, layers: int) -> Thresholds:
    """What `save_thresholds` wrote for a model of so many layers.

    Raises:
        ModelError: naming the file, if it is missing, damaged, or of another model.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError("too large")
        fields = parse_json(path.read_bytes())
        found = Thresholds(float(fields["error"]), int(fields["tokens"]), _layers(fields["layers"]))
        if fields["version"] != VERSION or len(found.layers) != layers:
            raise ValueError(f"version {str(fields['version'])[:20]} with {len(found.layers)} layers")
    except (OSError, KeyError, TypeError, ValueError, RecursionError, OverflowError) as error:
        raise ModelError(f"{path} cannot be used ({str(error)[:100]}); calibrate the model again") from error
    return found


def _layers(entries: Sequence[dict[str, float]]) -> tuple[LayerThreshold, ...]:
    made = tuple(LayerThreshold(*(float(one[name]) for name in ("threshold", "skipped", "error"))) for one in entries)
    if not all(np.isfinite([one.threshold, one.skipped, one.error]).all() and one.threshold >= 0 for one in made):
        raise ValueError("a threshold that is no number from 0")
    return made
