"""How much of a SwiGLU model may be left out at which error: a curve for each layer, measured once over a text.

The error is that of a feed-forward block: the length of what is left out as a share of the length of the block's whole
result, of each token's own, in root mean square over the tokens (a few tokens have results a hundred times as long as
all others). The blocks before are thresholded already, at `DEFAULT_ERROR`. Whoever asks for an error gets of each layer
the largest threshold on its curve that holds it, so that another error needs no other measurement.

The file is numpy's .npz beside the pack: `thresholds`, `skipped` and `errors` float32 `[layers, points]`, `norms`
float32 `[layers, neurons]`, and what was measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tpi.errors import ModelError
from tpi.kernels import Kernels
from tpi.pack.reader import Pack
from tpi.progress import Progress, silent
from tpi.sparsity.replay import FfnWeights, replay
from tpi.sparsity.thresholds import DEFAULT_ERROR, LayerThreshold, Thresholds, above, importance
from tpi.system.arrays import read_arrays, save_arrays

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
VERSION = 1
NEVER = float(np.finfo(np.float32).max)  # an activation that no neuron reaches
_STEPS = 40  # shares of skipped neurons that are tried
_TOKENS = 256  # of a layer's input that the curve is measured on: each step multiplies with down once more
_MOST_BYTES = 1 << 30


@dataclass(frozen=True, eq=False)
class GateCurve:
    """Of one layer: at rising `thresholds`, `[points]`, which share of the neurons is `skipped` and what `errors` that
    makes; `norms`, `[neurons]`, are the lengths of the columns of down."""

    thresholds: F32
    skipped: F32
    errors: F32
    norms: F32

    def at(self, error: float) -> LayerThreshold:
        """The last point before the first whose error is above `error`."""
        over = np.flatnonzero(self.errors > np.float32(error))
        point = (int(over[0]) if len(over) else len(self.errors)) - 1
        if point < 0:
            return LayerThreshold(0.0, 0.0, 0.0)
        return LayerThreshold(*(float(each[point]) for each in (self.thresholds, self.skipped, self.errors)))

    def least(self, error: float) -> F32:
        """The activations below which neurons are left out, `[neurons]`: see `tpi.kernels.gated.GatedKernels`."""
        wanted = np.full(len(self.norms), NEVER, np.float32)
        some = self.norms > 0
        wanted[some] = np.minimum(np.float32(self.at(error).threshold) / self.norms[some], np.float32(NEVER))
        return wanted


@dataclass(frozen=True, eq=False)
class GateCurves:
    """The curves of all layers, measured on `tokens` tokens; `of` names the pack and the text."""

    of: str
    tokens: int
    layers: tuple[GateCurve, ...]

    def at(self, error: float) -> Thresholds:
        """The thresholds that hold an error.

        Raises:
            ModelError: unless it is a share from 0 to 1.
        """
        check_error(error)
        return Thresholds(error, tuple(curve.at(error) for curve in self.layers))


def check_error(error: float) -> None:
    """Raise a ModelError unless `error` is a share from 0 to 1."""
    if not 0 <= error < 1:
        raise ModelError(f"an error of {error} is not possible; give a share from 0 to 1, such as {DEFAULT_ERROR}")


def curve_of(weights: FfnWeights, x: F32) -> GateCurve:
    """What leaving 1/40, 2/40, ... of a layer's neurons out costs, for `x` `[tokens, hidden]`, normed."""
    x = x[:: max(1, len(x) // _TOKENS)]
    counts, inner = importance(weights, x), weights.inner(x)
    sizes = np.maximum(np.linalg.norm(inner @ weights.down, axis=1), np.float32(1e-30))
    thresholds = np.quantile(counts, np.arange(_STEPS) / _STEPS).astype(np.float32)
    thresholds[0] = 0
    points = [_cost(counts < threshold, inner, weights.down, sizes) for threshold in thresholds]
    skipped, errors = (np.asarray(each, np.float32) for each in zip(*points, strict=True))
    return GateCurve(thresholds, skipped, errors, weights.down_norms)


def measure_curves(
    pack: Pack, tokens: I32, kernels: Kernels, of: str = "", error: float = DEFAULT_ERROR, progress: Progress = silent
) -> GateCurves:
    """The curves of a model, measured on `tokens` `[sequences, length]` with the layers before at `error`.

    Raises:
        ModelError: if `error` is no share, or the model has other blocks than attention and feed-forward.
    """
    check_error(error)
    found: list[GateCurve] = []

    def measure(layer: int, weights: FfnWeights, x: F32) -> F32:
        found.append(curve_of(weights, x))
        progress(len(found), pack.config.layers)
        return above(weights, x, found[-1].at(error).threshold)

    replay(pack, tokens, kernels, measure)
    return GateCurves(of, tokens.size, tuple(found))


def save_curves(path: Path, curves: GateCurves) -> None:
    """Write the curves, the file as a whole or not at all.

    Raises:
        WeightsError: if it cannot be written.
    """
    arrays = {name: np.stack([getattr(curve, name) for curve in curves.layers]) for name in _ARRAYS}
    save_arrays(path, of=curves.of, numbers=[VERSION, curves.tokens], **arrays)


def load_curves(path: Path, layers: int, neurons: int) -> GateCurves | None:
    """What `save_curves` wrote for a model of this shape; None if there is no such file.

    Raises:
        ModelError: naming the file, if it is damaged or of another model.
    """
    if not path.exists():
        return None
    with read_arrays(path, _MOST_BYTES, "remove it, and profile the model again") as file:
        version, tokens = file["numbers"].tolist()
        of, arrays = str(file["of"]), [file[name] for name in _ARRAYS]
        _check(version, arrays, layers, neurons)
    return GateCurves(of, tokens, tuple(GateCurve(*each) for each in zip(*arrays, strict=True)))


_ARRAYS = ("thresholds", "skipped", "errors", "norms")


def _cost(left_out: npt.NDArray[np.bool_], inner: F32, down: F32, sizes: F32) -> tuple[float, float]:
    """The share that is left out, and the error that makes."""
    if not left_out.any():
        return 0.0, 0.0
    lost = np.linalg.norm(np.where(left_out, inner, np.float32(0)) @ down, axis=1) / sizes
    return float(np.mean(left_out)), float(np.sqrt(np.mean(np.square(lost))))


def _check(version: int, arrays: Sequence[F32], layers: int, neurons: int) -> None:
    if version != VERSION:
        raise ValueError(f"version {version}, not {VERSION}")
    points = arrays[0].shape[-1:]
    shapes = [(layers, *points)] * 3 + [(layers, neurons)]
    if [array.shape for array in arrays] != shapes or any(array.dtype != np.float32 for array in arrays):
        raise ValueError(f"it is of another model than one of {layers} layers and {neurons} neurons")
    if not points[0] or not all(np.isfinite(array).all() and array.min() >= 0 for array in arrays):
        raise ValueError("a number that is none from 0")
