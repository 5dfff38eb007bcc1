"""The neuron profile of a model over a text: activation counts, and the active neurons of a sample of tokens.

The file is a NumPy .npz in the pack's directory: `counts` int64 `[layers, neurons]`, `bits` uint8 `[layers, tokens,
bytes]` (one bit for each neuron, lowest bit first), and the identification of the pack and text. If there is no
profile, the marks of a PowerInfer source may be used: the neurons that its solver puts on a GPU. They are `marks` uint8
`[layers, bytes]`, packed the same way, in a file of their own.
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
MARKED = "gpuidx.npz"  # in the same directory
VERSION = 1
SAMPLE = 4096  # most tokens in the sample
_MOST_BYTES = 2 << 30
_COMPANIONS = 1024  # most neurons of a layer that predict others; all would take minutes for a large model


@dataclass(frozen=True, eq=False)
class NeuronProfile:
    """The profile of `tokens` tokens so far.

    `of` identifies the pack and the text, so that a profile is continued only with the same ones. `counts` and `bits`
    are described at the top of this module; `bits` has at most `SAMPLE` tokens.
    """

    of: str
    tokens: int
    neurons: int
    counts: I64
    bits: U8

    @classmethod
    def empty(cls, of: str, layers: int, neurons: int) -> "NeuronProfile":
        """Create a profile without any sample, for a model of `layers` layers with `neurons` neurons each."""
        width = -(-neurons // 8)
        return cls(of, 0, neurons, np.zeros((layers, neurons), np.int64), np.zeros((layers, 0, width), np.uint8))

    def extended(self, counts: I64, bits: U8) -> "NeuronProfile":
        """Return the profile with more tokens added.

        `counts` `[layers, neurons]` is the number of the added tokens that activate each neuron; `bits` `[layers,
        tokens, bytes]` has the active neurons of each added token.
        """
        room = max(0, SAMPLE - self.bits.shape[1])
        kept = np.concatenate([self.bits, bits[:, :room]], axis=1)
        return NeuronProfile(self.of, self.tokens + bits.shape[1], self.neurons, self.counts + counts, kept)

    @property
    def layers(self) -> int:
        """Number of layers of the model."""
        return len(self.counts)

    @property
    def frequency(self) -> F64:
        """Share of the tokens for which each neuron is active: `[layers, neurons]`, from 0 to 1."""
        return self.counts / max(1, self.tokens)

    def active(self, layer: int) -> Active:
        """Return which neurons of `layer` are active for each token of the sample: bool `[tokens, neurons]`."""
        return np.unpackbits(self.bits[layer], axis=1, count=self.neurons, bitorder="little").astype(bool)

    def foretold(self, layer: int, ahead: int) -> float:
        """Return how reliably single neurons of `layer` predict neurons of `layer + ahead`, a score from 0 to 1.

        A neuron a predicts a neuron b with the share of a's tokens that activate b too. For each neuron of the later
        layer, the best such share of the most active neurons of `layer` counts. The result is the mean of these shares
        over all activations of the later layer.
        """
        companions, foretold = self.active(layer), self.active(layer + ahead)
        companions = companions[:, np.argsort(-companions.sum(axis=0), kind="stable")[:_COMPANIONS]]
        often = np.maximum(companions.sum(axis=0), 8)  # a neuron seen once would seem to predict everything
        pairs = companions.astype(np.float32).T @ foretold.astype(np.float32)
        weights = foretold.sum(axis=0)
        return float((pairs / often[:, None]).max(axis=0) @ weights / max(1, int(weights.sum())))


def cumulative(counts: I64) -> F64:
    """Return the share of all activations that the `i + 1` most active neurons have: `[neurons]`, rising to 1.

    This is the curve of PowerInfer, figure 5.
    """
    ordered = np.sort(counts.reshape(-1))[::-1]
    return np.asarray(np.cumsum(ordered) / max(1, int(ordered.sum())), np.float64)


def hot_share(counts: I64, of: float = 0.8) -> float:
    """Return the smallest share of the neurons that together have the share `of` of all activations."""
    curve = cumulative(counts)
    return float((np.searchsorted(curve, of - 1e-12) + 1) / len(curve)) if curve[-1] else 0.0


def pack_bits(active: Active) -> U8:
    """Pack bools `[..., neurons]` into bits `[..., bytes]`, in the format of `NeuronProfile.bits`."""
    return np.packbits(active, axis=-1, bitorder="little")


def save_profile(path: Path, use: NeuronProfile) -> None:
    """Write the profile `use` to `path`, atomically.

    Raises:
        WeightsError: if the file cannot be written.
    """
    numbers = [VERSION, use.tokens, use.neurons]
    save_arrays(path, of=use.of, numbers=numbers, counts=use.counts, bits=use.bits)


def load_profile(path: Path) -> NeuronProfile:
    """Return the profile that `save_profile` wrote.

    Raises:
        ModelError: if the file is missing or damaged.
    """
    with read_arrays(path, _MOST_BYTES, "remove it, and profile the model again") as file:
        version, tokens, neurons = file["numbers"].tolist()
        use = NeuronProfile(str(file["of"]), tokens, neurons, file["counts"], file["bits"])
        _check(version, use)
    return use


def save_marks(path: Path, marks: Active) -> None:
    """Write `marks`, bool `[layers, neurons]`, which are True for the neurons that a GPU should hold.

    Raises:
        WeightsError: if the file cannot be written.
    """
    save_arrays(path, marks=pack_bits(marks), neurons=marks.shape[1])


def load_marks(path: Path, layers: int, neurons: int) -> Active | None:
    """Return the marks that `save_marks` wrote, bool `[layers, neurons]`; None if the file does not exist.

    Raises:
        ModelError: if the file is damaged, or belongs to a model of another shape.
    """
    if not path.exists():
        return None
    with read_arrays(path, _MOST_BYTES, "remove it, or pack the model again") as file:
        found = np.unpackbits(file["marks"], axis=1, count=int(file["neurons"]), bitorder="little").astype(np.bool_)
        if found.shape != (layers, neurons):
            raise ValueError(f"it belongs to another model: this one has {layers} layers of {neurons} neurons")
    return found


def _check(version: int, use: NeuronProfile) -> None:
    if version != VERSION:
        raise ValueError(f"version {version}, not {VERSION}")
    bits, counts = use.bits, use.counts
    if counts.shape != (len(bits), use.neurons) or bits.ndim != 3 or bits.shape[2] != -(-use.neurons // 8):
        raise ValueError("the shapes of its arrays do not match")
    if counts.dtype != np.dtype(np.int64) or bits.dtype != np.dtype(np.uint8) or counts.min(initial=0) < 0:
        raise ValueError("its arrays have wrong types, or a count is negative")
