"""A profile over a text, piece by piece: progress is stored after each piece, and continued the next time."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tpi.config import SPARSE
from tpi.errors import ModelError
from tpi.kernels import Kernels
from tpi.pack.manifest import MANIFEST
from tpi.pack.reader import Pack
from tpi.progress import Progress, phase
from tpi.sparsity.gates import GateCurves, load_curves, measure_curves, save_curves
from tpi.sparsity.replay import F32, I32, FfnWeights, dense, replay
from tpi.sparsity.thresholds import DEFAULT_ERROR, importance
from tpi.sparsity.thresholds import NAME as GATES
from tpi.sparsity.usage import I64, NAME, U8, NeuronUse, load_use, packed, save_use

Active = npt.NDArray[np.bool_]
Judge = Callable[[int, FfnWeights, F32], Active]  # layer, weights and its input: which neurons are active
PIECE = 8  # sequences that pass through the model together


def profile_model(pack: Pack, tokens: I32, kernels: Kernels, progress: Progress) -> NeuronUse:
    """Return the use of a model's neurons over `tokens` `[sequences, length]`; store it after every piece.

    Raises:
        ModelError: if the model has experts, or the stored profile is damaged.
        WeightsError: if the profile cannot be stored.
    """
    path = pack.path / NAME
    use = _begun(pack, tokens, path)
    judge = _judge(pack, None if pack.config.activation in SPARSE else gate_curves(pack, tokens, kernels))
    done = use.tokens // tokens.shape[1]
    progress(done, len(tokens))
    while done < len(tokens):
        piece = tokens[done : done + PIECE]
        use = use.plus(*_counted(pack, piece, kernels, judge))
        done += len(piece)
        save_use(path, use)
        progress(done, len(tokens))
    return use


def _begun(pack: Pack, tokens: I32, path: Path) -> NeuronUse:
    """Return the stored profile of this pack and text, or an empty one."""
    of = text_id(pack, tokens)
    if path.exists() and (kept := load_use(path)).of == of:
        return kept
    return NeuronUse.nothing(of, pack.config.layers, pack.config.intermediate)


def gate_curves(pack: Pack, tokens: I32, kernels: Kernels) -> GateCurves:
    """Return how many neurons may be left out at which error, from the first piece of `tokens`; store it.

    Raises:
        ModelError: if the stored curves are damaged.
        WeightsError: if they cannot be stored.
    """
    path, of = pack.path / GATES, text_id(pack, tokens)
    kept = load_curves(path, pack.config.layers, pack.config.intermediate)
    if kept is not None and kept.of == of:
        return kept
    with phase(f"measuring what {pack.path.name} may leave out") as progress:
        found = measure_curves(pack, tokens[:PIECE], kernels, of, progress=progress)
    if len(found.layers) == pack.config.layers:  # the caller refuses models with other layers
        save_curves(path, found)
    return found


def text_id(pack: Pack, tokens: I32) -> str:
    """Return an id of the pack and text of a measurement."""
    manifest = (pack.path / MANIFEST).read_bytes()
    return hashlib.sha256(
        manifest + np.array(tokens.shape, "<i4").tobytes() + tokens.astype("<i4").tobytes()
    ).hexdigest()


def _judge(pack: Pack, curves: GateCurves | None) -> Judge:
    """Return a function that says which neurons are active.

    It uses the activation if that can be 0, else the thresholds for the default error.
    """
    if curves is None:
        return lambda layer, weights, x: weights.active(x)
    layers = curves.at(DEFAULT_ERROR).layers
    return lambda layer, weights, x: np.asarray(importance(weights, x) >= np.float32(layers[layer].threshold))


def _counted(pack: Pack, piece: I32, kernels: Kernels, judge: Judge) -> tuple[I64, U8]:
    """Return how many tokens activate each neuron, `[layers, neurons]`, and which, `[layers, tokens, bytes]`."""
    counts: list[I64] = []
    bits: list[U8] = []

    def watch(layer: int, weights: FfnWeights, x: F32) -> F32:
        active = judge(layer, weights, x)
        counts.append(active.sum(axis=0, dtype=np.int64))
        bits.append(packed(active))
        return dense(layer, weights, x)

    replay(pack, piece, kernels, watch)
    if len(counts) != pack.config.layers:
        raise ModelError(f"{pack.path} has layers without a feed-forward network; they cannot be profiled")
    return np.stack(counts), np.stack(bits)
