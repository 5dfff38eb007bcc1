"""A profile over a text, piece by piece: what is done is kept after each piece, and gone on with the next time."""

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
from tpi.progress import Progress
from tpi.sparsity.replay import F32, I32, FfnWeights, dense, replay
from tpi.sparsity.thresholds import NAME as THRESHOLDS
from tpi.sparsity.thresholds import Thresholds, calibrate, importance, load_thresholds
from tpi.sparsity.usage import I64, NAME, U8, NeuronUse, load_use, packed, save_use

Active = npt.NDArray[np.bool_]
Judge = Callable[[int, FfnWeights, F32], Active]  # layer, weights and its input: which neurons are active
PIECE = 8  # sequences that pass the model together


def profile_model(pack: Pack, tokens: I32, kernels: Kernels, progress: Progress) -> NeuronUse:
    """The use of a model's neurons over `tokens` `[sequences, length]`; kept beside the pack after every piece.

    Raises:
        ModelError: if the model has experts, or what is kept beside the pack is damaged.
        WeightsError: if nothing can be kept there.
    """
    path = pack.path / NAME
    use = _begun(pack, tokens, path)
    judge = _judge(pack, tokens[:PIECE], kernels)
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
    """What was done before, if it was with this pack and text; else a beginning."""
    manifest = (pack.path / MANIFEST).read_bytes()
    of = hashlib.sha256(manifest + np.array(tokens.shape, "<i4").tobytes() + tokens.astype("<i4").tobytes()).hexdigest()
    if path.exists() and (kept := load_use(path)).of == of:
        return kept
    return NeuronUse.nothing(of, pack.config.layers, pack.config.intermediate)


def _judge(pack: Pack, first: I32, kernels: Kernels) -> Judge:
    """By the activation, if it can be 0; else by the thresholds beside the pack, or new ones from the first piece."""
    if pack.config.activation in SPARSE:
        return lambda layer, weights, x: np.asarray(weights.gated(x) != 0)
    path = pack.path / THRESHOLDS
    found: Thresholds = load_thresholds(path, pack.config.layers) if path.exists() else calibrate(pack, first, kernels)
    return lambda layer, weights, x: np.asarray(importance(weights, x) >= np.float32(found.layers[layer].threshold))


def _counted(pack: Pack, piece: I32, kernels: Kernels, judge: Judge) -> tuple[I64, U8]:
    """How many tokens have each neuron, and which: `[layers, neurons]` and `[layers, tokens, bytes]`."""
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
