"""How a model's neurons are used over a text: counts, and for a part of the tokens which were active with which.

The file is numpy's .npz beside the pack: `counts` int64 `[layers, neurons]`, `bits` uint8 `[layers, tokens, bytes]` (a
bit a neuron, the lowest first), and what the profile is of. Without a profile, a source may say which neurons its
engine's solver puts on a GPU: `marks` uint8 `[layers, bytes]`, likewise, in a file of their own.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tpi.system.arrays import read_arrays, save_arrays

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
F64 = npt.NDArray[np.float64]
F32 = npt.NDArray[np.float32]
Active = npt.NDArray[np.bool_]

NAME = "profile.npz"  # in the pack's directory
MARKED = "gpuidx.npz"  # beside it
VERSION = 1
SAMPLE = 4096  # tokens whose active neurons are kept one by one
_MOST_BYTES = 2 << 30
_COMPANIONS = 1024  # of a layer's neurons; all would take minutes for a large model


@dataclass(frozen=True, eq=False)
class NeuronUse:
    """Of `tokens` tokens so far; `of` names the pack and the text, so that a profile goes on with its own alone."""

    of: str
    tokens: int
    neurons: int
    counts: I64
    bits: U8

    @classmethod
    def nothing(cls, of: str, layers: int, neurons: int) -> "NeuronUse":
        """Before the first token."""
        width = -(-neurons // 8)
        return cls(of, 0, neurons, np.zeros((layers, neurons), np.int64), np.zeros((layers, 0, width), np.uint8))

    def plus(self, counts: I64, bits: U8) -> "NeuronUse":
        """With more tokens: how many have each neuron, `[layers, neurons]`, and which, as in `bits`."""
        room = max(0, SAMPLE - self.bits.shape[1])
        kept = np.concatenate([self.bits, bits[:, :room]], axis=1)
        return NeuronUse(self.of, self.tokens + bits.shape[1], self.neurons, self.counts + counts, kept)

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return len(self.counts)

    @property
    def frequency(self) -> F64:
        """How often each neuron is active, `[layers, neurons]` from 0 to 1."""
        return self.counts / max(1, self.tokens)

    def active(self, layer: int) -> Active:
        """Of the sample: `[tokens, neurons]`."""
        return np.unpackbits(self.bits[layer], axis=1, count=self.neurons, bitorder="little").astype(bool)

    def together(self, layer: int, ahead: int = 0) -> F32:
        """How many tokens of the sample have a neuron of `layer` and one of `layer + ahead`: `[neurons, neurons]`."""
        first, second = (self.active(at).astype(np.float32) for at in (layer, layer + ahead))
        return np.asarray(first.T @ second, np.float32)

    def foretold(self, layer: int, ahead: int) -> float:
        """What single neurons of `layer` tell of `layer + ahead`: for each neuron there the share of the tokens with
        its best companion, one of the most active, that have it, too; the mean over all that is active."""
        companions, foretold = self.active(layer), self.active(layer + ahead)
        companions = companions[:, np.argsort(-companions.sum(axis=0), kind="stable")[:_COMPANIONS]]
        often = np.maximum(companions.sum(axis=0), 8)  # of a neuron seen once anything would follow
        pairs = companions.astype(np.float32).T @ foretold.astype(np.float32)
        weights = foretold.sum(axis=0)
        return float((pairs / often[:, None]).max(axis=0) @ weights / max(1, int(weights.sum())))


def cumulative(counts: I64) -> F64:
    """PowerInfer's figure 5: what share of all activations the most active neurons make; `[neurons]`, rising to 1."""
    ordered = np.sort(counts.reshape(-1))[::-1]
    return np.asarray(np.cumsum(ordered) / max(1, int(ordered.sum())), np.float64)


def hot_share(counts: I64, of: float = 0.8) -> float:
    """The share of the neurons that makes `of` of all activations."""
    curve = cumulative(counts)
    return float((np.searchsorted(curve, of - 1e-12) + 1) / len(curve)) if curve[-1] else 0.0


def packed(active: Active) -> U8:
    """As `NeuronUse.bits` has them: `[..., neurons]` to `[..., bytes]`."""
    return np.packbits(active, axis=-1, bitorder="little")


def save_use(path: Path, use: NeuronUse) -> None:
    """Write a profile, the file as a whole or not at all.

    Raises:
        WeightsError: if it cannot be written.
    """
    numbers = [VERSION, use.tokens, use.neurons]
    save_arrays(path, of=use.of, numbers=numbers, counts=use.counts, bits=use.bits)


def load_use(path: Path) -> NeuronUse:
    """What `save_use` wrote.

    Raises:
        ModelError: naming the file, if it is missing or damaged.
    """
    with read_arrays(path, _MOST_BYTES, "remove it, and profile the model again") as file:
        version, tokens, neurons = file["numbers"].tolist()
        use = NeuronUse(str(file["of"]), tokens, neurons, file["counts"], file["bits"])
        _check(version, use)
    return use


def save_marks(path: Path, marks: Active) -> None:
    """Write which neurons are for a GPU. Raises WeightsError if that cannot be written."""
    save_arrays(path, marks=packed(marks), neurons=marks.shape[1])


def load_marks(path: Path, layers: int, neurons: int) -> Active | None:
    """What `save_marks` wrote for a model of this shape, `[layers, neurons]`; None if there is no such file.

    Raises:
        ModelError: naming the file, if it is damaged or of another model.
    """
    if not path.exists():
        return None
    with read_arrays(path, _MOST_BYTES, "remove it, or pack the model again") as file:
        found = np.unpackbits(file["marks"], axis=1, count=int(file["neurons"]), bitorder="little").astype(np.bool_)
        if found.shape != (layers, neurons):
            raise ValueError(f"it is of another model than one of {layers} layers and {neurons} neurons")
    return found


def _check(version: int, use: NeuronUse) -> None:
    if version != VERSION:
        raise ValueError(f"version {version}, not {VERSION}")
    bits, counts = use.bits, use.counts
    if counts.shape != (len(bits), use.neurons) or bits.ndim != 3 or bits.shape[2] != -(-use.neurons // 8):
        raise ValueError("its arrays do not fit each other")
    if counts.dtype != np.dtype(np.int64) or bits.dtype != np.dtype(np.uint8) or counts.min(initial=0) < 0:
        raise ValueError("its arrays are not counts and bits")
