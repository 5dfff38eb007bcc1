"""An untrained ReGLU model of any shape whose neurons are active as in a trained model, to measure speed.

A gate's value is `w . x + b`: `x` is normed, so that `w . x` is distributed as N(0, 1) over tokens, and the bias alone
decides how often a neuron is active. Biases are set for a power law of these frequencies. Embeddings of neighbouring
tokens share a part of their direction, for a chosen similarity from token to token; and gates are of low rank but for a
little noise, which is what lets a small predictor know them. The predictor is written beside the pack: with `[B, -B]`
and `[A, -A]` for gates `A B`, ReLU between its matrices changes nothing.

The head's row j + 1 is the embedding of token j: the model counts, and so stays where neighbours are alike.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, ndtri

from tests.support.weights.shapes import write_byte_tokenizer
from tpi.families.huggingface.reader import from_huggingface
from tpi.pack.builder import tokens
from tpi.pack.builder.build import OpenedSource, pack_model
from tpi.pack.reader import Pack, is_pack
from tpi.sources.base import Bytes, SourceTensor
from tpi.sources.elements import Element
from tpi.sparsity.files import NAME, save_predictors
from tpi.sparsity.predictor import Predictor, PredictorMatrix

F32 = npt.NDArray[np.float32]

ADDED = 0.1  # variance that all blocks together add to that of the embedding, which is 1
SHARPNESS = 30.0  # the logit of the token that follows
_KEPT = 4  # tensors that are made and not yet written
_POINTS = 48  # biases at which the probability of two tokens together is computed


@dataclass(frozen=True)
class NeuronUse:
    """Settings of how often neurons are active.

    Attributes:
        active: share of the neurons that a token activates, on average.
        power: exponent of the power law: a neuron's frequency falls with this power of its rank.
        most: the frequency of the hottest neurons.
        similar: share of a token's active neurons that were active for the token before, too.
        rank: rank of the gates' matrices.
        noise: the share of a gate's variance that is beyond that rank, and beyond any small predictor.
        hot_first: True if neurons are numbered as by a profile, the hottest first; else in random order.
    """

    active: float = 0.1
    power: float = 0.7
    most: float = 0.75
    similar: float = 0.55
    rank: int = 96
    noise: float = 0.02
    hot_first: bool = False

    def frequencies(self, neurons: int) -> npt.NDArray[np.float64]:
        """Return each neuron's frequency, the hottest first: a power law with the mean `active`, at most `most`."""
        law = np.arange(1, neurons + 1, dtype=np.float64) ** -self.power
        low, high = 0.0, float(neurons)
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if np.minimum(law * middle, self.most).mean() < self.active else (low, middle)
        return np.minimum(law * high, self.most)

    def correlation(self, neurons: int) -> float:
        """Return the correlation of neighbouring tokens' inputs at which the share `similar` stays active."""
        low, high = 0.0, 0.999
        for _ in range(20):
            middle = (low + high) / 2
            low, high = (middle, high) if self.repeated(neurons, middle) < self.similar else (low, middle)
        return (low + high) / 2

    def repeated(self, neurons: int, correlation: float) -> float:
        """Return the share of a token's active neurons that are active for another token with this `correlation`."""
        often = self.frequencies(neurons)
        points = np.quantile(often, np.linspace(0, 1, _POINTS))
        from scipy.stats import multivariate_normal  # takes a second to import

        pair = multivariate_normal([0, 0], [[1, correlation], [correlation, 1]])
        both = np.array([pair.cdf([value, value]) for value in ndtri(points)])
        return float(np.interp(often, points, both).sum() / often.sum())

    def by_bias_alone(self, neurons: int) -> float:
        """Return the recall if the most frequently active neurons, the share `active`, are always predicted."""
        often = self.frequencies(neurons)
        return float(often[: round(self.active * neurons)].sum() / often.sum())


class RegularModel:
    """The tensors of a model of `shape` (a config.json) with neurons active as `use` says.

    Each tensor is made on request.
    """

    def __init__(self, shape: Mapping[str, Any], use: NeuronUse, seed: int = 0) -> None:
        self.shape = {**shape, "hidden_act": "relu", "mlp_bias": True, "attention_bias": False}
        self.use, self._seed = use, seed
        number = {key: int(value) for key, value in shape.items() if type(value) is int}
        self._hidden, self._inner = number["hidden_size"], number["intermediate_size"]
        self._vocab, self.layers = number["vocab_size"], number["num_hidden_layers"]
        self._kv = number["num_key_value_heads"] * number["head_dim"]
        self._query = number["num_attention_heads"] * number["head_dim"]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor, by its name in a Hugging Face directory."""
        hidden, inner = self._hidden, self._inner
        found: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self._vocab, hidden), "lm_head.weight": (self._vocab, hidden),
            "model.norm.weight": (hidden,),
        }  # fmt: skip
        for layer in range(self.layers):
            found |= {f"model.layers.{layer}.{name}": size for name, size in {
                "self_attn.q_proj.weight": (self._query, hidden), "self_attn.k_proj.weight": (self._kv, hidden),
                "self_attn.v_proj.weight": (self._kv, hidden), "self_attn.o_proj.weight": (hidden, self._query),
                "input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,),
                "mlp.gate_proj.weight": (inner, hidden), "mlp.gate_proj.bias": (inner,),
                "mlp.up_proj.weight": (inner, hidden), "mlp.up_proj.bias": (inner,),
                "mlp.down_proj.weight": (hidden, inner), "mlp.down_proj.bias": (hidden,),
            }.items()}  # fmt: skip
        return found

    def tensor(self, name: str) -> F32:
        """Return the values of the tensor `name`."""
        size = self.shapes()[name]
        if name == "lm_head.weight":
            return np.asarray(np.roll(self.embedding, 1, axis=0) * np.float32(SHARPNESS / self._hidden), np.float32)
        if name == "model.embed_tokens.weight":
            return self.embedding
        if name.endswith("norm.weight"):
            return np.ones(size, np.float32)
        layer = int(name.split(".")[2])
        if name.endswith(".bias"):
            return self.biases(layer) if "gate" in name else np.zeros(size, np.float32)
        if "gate_proj" in name:
            return self._gate(layer)
        return np.asarray(self._normal(name, *size) * np.float32(self._spread(name, size)), np.float32)

    @cached_property
    def embedding(self) -> F32:
        """The embedding `[vocab, hidden]`, of variance 1; neighbouring tokens have the wanted correlation."""
        alike = self.use.correlation(self._inner) * (1 + ADDED / 2)
        own = self._normal("own", self._vocab, self._hidden)
        slow = self._normal("slow", self._vocab // 64 + 2, self._hidden)
        at = np.arange(self._vocab) / 64  # from one direction to the next over 64 tokens
        part = (at % 1)[:, None].astype(np.float32) * np.float32(np.pi / 2)
        shared = slow[at.astype(int)] * np.cos(part) + slow[at.astype(int) + 1] * np.sin(part)
        share = np.float32(min(alike, 0.999))
        return np.asarray(shared * np.sqrt(share) + own * np.sqrt(1 - share), np.float32)

    def biases(self, layer: int) -> F32:
        """Return the biases of a layer's gates: neurons of every frequency, in random order or the hottest first."""
        values: F32 = np.asarray(ndtri(self.use.frequencies(self._inner)), np.float32)
        if self.use.hot_first:
            return values
        return np.asarray(self._random(f"order {layer}").permutation(values), np.float32)

    def factors(self, layer: int) -> tuple[F32, F32]:
        """Return the low-rank part of a layer's gates: `[rank, hidden]` and `[neurons, rank]`."""
        rank, known = self.use.rank, 1 - self.use.noise
        below = self._normal(f"below {layer}", rank, self._hidden) * np.float32(self._hidden**-0.5)
        above = self._normal(f"above {layer}", self._inner, rank)
        above *= np.float32(known**0.5) / np.linalg.norm(above, axis=1, keepdims=True)
        return below, above

    def predictor(self, layer: int) -> Predictor:
        """Return a layer's predictor, of twice the gates' rank, which knows everything except the noise."""
        below, above = self.factors(layer)
        first = PredictorMatrix.of(np.concatenate([below, -below]), "q8")
        return Predictor(layer, first, PredictorMatrix.of(np.concatenate([above, -above], axis=1), "q8"),
                         bias=self.biases(layer))  # fmt: skip

    def _gate(self, layer: int) -> F32:
        below, above = self.factors(layer)
        noise = self._normal(f"noise {layer}", self._inner, self._hidden)
        noise *= np.float32((self.use.noise / self._hidden) ** 0.5)
        return np.asarray(above @ below + noise, np.float32)

    def _spread(self, name: str, size: tuple[int, ...]) -> float:
        """Return the standard deviation of a matrix's values, such that all blocks together add variance `ADDED`."""
        added = ADDED / (2 * self.layers)
        if "down_proj" in name:
            bias = ndtri(self.use.frequencies(self._inner))
            density = np.exp(-(bias**2) / 2) / np.sqrt(2 * np.pi)
            return float(np.sqrt(added / ((1 + bias**2) * ndtr(bias) + bias * density).sum()))
        return float(np.sqrt((added if "o_proj" in name else 1.0) / size[1]))

    def _normal(self, name: str, *size: int) -> F32:
        return self._random(name).standard_normal(size, np.float32)

    def _random(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self._seed, *name.encode()])


class RegularSource:
    """A `tpi.sources.base.Source` of a model whose tensors are made when they are read."""

    def __init__(self, label: str, model: RegularModel) -> None:
        self.label = label
        self._model = model
        self._made: OrderedDict[str, F32] = OrderedDict()
        self.tensors: Mapping[str, SourceTensor] = {
            name: SourceTensor(name, size, Element("F32", 1, 4), Path(label), 0)
            for name, size in model.shapes().items()
        }

    def read(self, tensor: SourceTensor, rows: tuple[int, int], columns: tuple[int, int]) -> Bytes:
        """Return rows and columns of a tensor, as `Source.read` specifies."""
        if tensor.name not in self._made:
            while len(self._made) >= _KEPT:
                self._made.popitem(last=False)
            self._made[tensor.name] = self._model.tensor(tensor.name)
        array = self._made[tensor.name].reshape(tensor.rows, tensor.columns)
        return np.ascontiguousarray(array[slice(*rows), slice(*columns)]).view(np.uint8)

    def close(self) -> None:
        """Do nothing: no file is open."""
        self._made.clear()


def write_regular(target: Path, shape: Mapping[str, Any], use: NeuronUse, dtype: str = "q4", seed: int = 0) -> Pack:
    """Write the pack of such a model with its predictors to `target`, unless it exists; return it."""
    if not is_pack(target):
        model = RegularModel(shape, use, seed)
        source = RegularSource(target.name, model)
        described = from_huggingface(model.shape, source.tensors.__contains__, target.name)

        def tokenizer(directory: Path) -> dict[str, Any]:
            write_byte_tokenizer(directory)
            return tokens.from_directory(directory, model.shape, described.config.vocab, directory)

        pack_model(OpenedSource(target.name, described, source, tokenizer), dtype, target)
        save_predictors(target / NAME, [model.predictor(layer) for layer in range(model.layers)], "made")
    return Pack.open(target)
