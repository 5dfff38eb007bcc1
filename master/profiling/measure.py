"""A profile over a text, piece by piece: progress is stored after each piece, and continued the next time."""

import hashlib
from pathlib import Path

import numpy as np

from tpi.errors import ModelError
from tpi.kernels import Kernels
from tpi.pack.manifest import MANIFEST
from tpi.pack.reader import Pack
from tpi.progress import Progress
from tpi.sparsity.replay import F32, I32, FfnWeights, dense, replay
from tpi.sparsity.usage import I64, NAME, U8, NeuronProfile, load_profile, pack_bits, save_profile

PIECE = 8  # sequences that pass through the model together


def profile_model(pack: Pack, tokens: I32, kernels: Kernels, progress: Progress) -> NeuronProfile:
    """Return the use of a model's neurons over `tokens` `[sequences, length]`; store it after every piece.

    Raises:
        ModelError: if the model has experts, or the stored profile is damaged.
        WeightsError: if the profile cannot be stored.
    """
    path = pack.path / NAME
    use = _begun(pack, tokens, path)
    done = use.tokens // tokens.shape[1]
    progress(done, len(tokens))
    while done < len(tokens):
        piece = tokens[done : done + PIECE]
        use = use.extended(*_counted(pack, piece, kernels))
        done += len(piece)
        save_profile(path, use)
        progress(done, len(tokens))
    return use


def _begun(pack: Pack, tokens: I32, path: Path) -> NeuronProfile:
    of = text_id(pack, tokens)
    if path.exists() and (kept := load_profile(path)).of == of:
        return kept
    return NeuronProfile.empty(of, pack.config.layers, pack.config.intermediate)


def text_id(pack: Pack, tokens: I32) -> str:
    """Return an id of the pack and text of a measurement."""
    manifest = (pack.path / MANIFEST).read_bytes()
    return hashlib.sha256(
        manifest + np.array(tokens.shape, "<i4").tobytes() + tokens.astype("<i4").tobytes()
    ).hexdigest()


def _counted(pack: Pack, piece: I32, kernels: Kernels) -> tuple[I64, U8]:
    """Return how many tokens activate each neuron, `[layers, neurons]`, and each token's active neurons as bits.

    The bits are `[layers, tokens, bytes]`.
    """
    counts: list[I64] = []
    bits: list[U8] = []

    def watch(layer: int, weights: FfnWeights, x: F32) -> F32:
        active = weights.active(x)
        counts.append(active.sum(axis=0, dtype=np.int64))
        bits.append(pack_bits(active))
        return dense(layer, weights, x)

    replay(pack, piece, kernels, watch)
    if len(counts) != pack.config.layers:
        raise ModelError(f"{pack.path} has layers without a feed-forward network; they cannot be profiled")
    return np.stack(counts), np.stack(bits)
