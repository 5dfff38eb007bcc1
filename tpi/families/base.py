"""The definition of a family: a table of tensor names and a few settings. This module names no family.

Tensor names are templates. `{i}` is the layer, `{e}` the routed expert. After the name may stand:

- `[q]`, `[k]`, `[v]`, `[gate]`, `[up]`: the rows of that part in a fused tensor.
- `[shared.gate]`, `[shared.up]`: the rows of that part in a fused tensor of the shared experts.
- `[first]`, `[second]`, `[third]`: that third of the rows of a tensor with three times the hidden size.
- `[expert]`: the rows of one expert in a stack of experts.
- `[expert.gate]`, `[expert.up]`: the rows of that part of one expert, where gate and up are fused.
- `[expert.even]`, `[expert.odd]`: every other row of one expert.
- `[expert.transposed]`: the rows of one expert in a stack in which each expert is transposed.
- `[even]`, `[odd]`: every other value of a vector.
- `?`: some models of the family lack this vector.
- `?field`: the vector exists exactly if `field` of the configuration is true.
- `|`: another template follows, which applies if the source lacks the tensor of this one.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tpi.config import Activation, BlockKind, Mixture, ModelConfig
from tpi.errors import ModelError
from tpi.sources.heads import HeadOrder

Fields = Mapping[str, Any]  # a config.json, or the metadata of a GGUF file
Numbers = Sequence[Sequence[int]]  # for each layer, the numbers that its blocks have in the source


@dataclass(frozen=True)
class Ref:
    """A reference to one matrix or vector of a model in its source."""

    tensor: str
    rows: tuple[int, int] | None = None  # its rows in a fused tensor; None: all
    add: float = 0.0  # added to each value when it is read
    transposed: bool = False  # the tensor is the transpose of the matrix
    stride: tuple[int, int] = (0, 1)  # (index of its first vector in the tensor, distance between its vectors)
    heads: HeadOrder | None = None  # the vectors that it takes from each head, in its order; None: all


@dataclass(frozen=True)
class BlockRefs:
    """References to the matrices (by part name) and the vectors of one block."""

    kind: BlockKind
    parts: tuple[tuple[str, Ref], ...]  # in a block of experts, the parts of the shared experts
    vectors: tuple[tuple[str, Ref], ...]
    experts: tuple[tuple[tuple[str, Ref], ...], ...] = ()  # the parts of each routed expert


@dataclass(frozen=True)
class PredictorRefs:
    """The two matrices of a layer's predictor, and its threshold."""

    layer: int
    first: str  # name of the tensor `[rank, hidden]`
    second: str  # name of the tensor `[neurons, rank]`
    threshold: float  # the score from which a neuron counts as active


@dataclass(frozen=True)
class MtpRefs:
    """References to the tensors of a layer for multi-token prediction, which predicts the token after next."""

    blocks: tuple[BlockRefs, ...]  # of the layer, in order of use
    projection: Ref  # `[hidden, 2 * hidden]`: from the normed embedding and the normed hidden states to its input
    norms: BlockRefs  # the vectors `token` and `hidden` for its input, and `norm` before the head


@dataclass(frozen=True)
class Model:
    """A model in its source: its configuration and references to its tensors."""

    config: ModelConfig
    layers: tuple[tuple[BlockRefs, ...], ...]  # the blocks of each layer, in order of use
    embedding: Ref
    head: Ref | None  # None: tied to the embedding
    positions: Ref | None
    final: BlockRefs
    per_layer: tuple[Ref, ...] = ()  # the table of per-layer embeddings, and their projection
    notes: tuple[str, ...] = ()  # sentences to show to the user
    predictors: tuple["PredictorRefs", ...] = ()  # from PowerInfer's files
    gpu_marks_file: Path | None = None  # GGUF file that marks the neurons PowerInfer puts on a GPU; may be the model's
    ignored_tensors: tuple[str, ...] = ()  # fnmatch patterns of tensors that may go unused (tpi.pack.builder.claims)
    mtp: MtpRefs | None = None  # the first layer for multi-token prediction; None: there is none

    def with_blocks(self, change: Callable[[BlockRefs], BlockRefs]) -> "Model":
        """Return the model with `change` applied to each block of its layers, the layer for prediction included."""
        mtp = self.mtp and replace(self.mtp, blocks=tuple(map(change, self.mtp.blocks)))
        return replace(self, layers=tuple(tuple(map(change, layer)) for layer in self.layers), mtp=mtp)


@dataclass(frozen=True)
class Names:
    """Templates of tensor names, without the common prefix. The name of the output head does not have that prefix."""

    embedding: str
    attention: Mapping[str, str]  # part or vector name -> template; one-letter names and gate, up, down are matrices
    ffn: Mapping[str, str]
    final: Mapping[str, str]
    head: str  # may be preceded by "language_model."
    positions: str | None = None
    prefixes: tuple[str, ...] = ("",)  # common prefixes; the first for which the embedding exists is used
    ignored_tensors: tuple[str, ...] = ()  # fnmatch patterns of whole names of tensors that may go unused
    experts: Mapping[str, str] | None = None  # replaces `ffn` in layers with experts; `shared.` marks shared experts
    per_layer: tuple[str, ...] = ()  # the table of per-layer embeddings, and their projection
    recurrent: Mapping[str, str] = field(default_factory=dict)  # replaces `attention` in recurrent layers
    mtp: Mapping[str, str] = field(default_factory=dict)  # what a layer for multi-token prediction has in addition
    apart: "Names | None" = None  # all names of that layer, without prefix, if they differ from those of other layers


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        name: the family's name in a ModelConfig.
        architectures: values of `architectures` in a config.json.
        gguf: the value of `general.architecture` in a GGUF file; None if GGUF files are not supported.
        names: templates for a Hugging Face directory.
        gguf_names: templates for a GGUF file.
        defaults: fields that are read from a config.json, with their defaults (`tpi.families.huggingface.defaults`).
        settings: returns the ModelConfig fields that differ from Llama's, from the fields of a config.json.
        gguf_settings: does the same from the metadata of a GGUF file.
        norm_offset: is added to norm weights: Gemma stores w and uses 1 + w.
        interleaved_rope: True if GGUF files of the family store the two values of a rotary pair next to each other.
        adapt_refs: adapts the references of a Hugging Face directory where templates do not suffice.
        adapt_gguf_refs: does the same for a GGUF file; it also receives a function that tells if a tensor exists.
        dense_layers: returns the numbers of the layers without experts, in a family with experts.
        numbers: returns for each layer the source's numbers of its blocks, in families that number blocks; None if
            blocks have the number of their layer.
        gguf_numbers: does the same from the metadata of a GGUF file.
        flatten: converts a config.json with nested objects or other field names; None if not needed.
    """

    name: str
    architectures: tuple[str, ...] = ()
    gguf: str | None = None
    names: Names | None = None
    gguf_names: Names | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    settings: Callable[[Fields], dict[str, Any]] = lambda fields: {}
    gguf_settings: Callable[[Fields], dict[str, Any]] = lambda fields: {}
    norm_offset: float = 0.0
    interleaved_rope: bool = False
    adapt_refs: Callable[[Model, Fields], Model] = lambda model, fields: model
    adapt_gguf_refs: Callable[[Model, Callable[[str], bool]], Model] = lambda model, has: model
    dense_layers: Callable[[Fields], Collection[int]] = lambda fields: ()
    numbers: Callable[[Fields], Numbers | None] = lambda fields: None
    gguf_numbers: Callable[[Fields], Numbers | None] = lambda fields: None
    flatten: Callable[[Fields], Fields] | None = None


_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "relu2": "relu2",
}  # fmt: skip
_LARGEST = 1e300  # larger whole numbers cannot be converted to float
_FFN = ("gate", "up", "down")
_ATTENTION = ("q", "gate", "o", "k", "v", "latent", "q_latent")
_HEADS = ("v", "gate", "o", "q", "k")
PARTS: Mapping[BlockKind, tuple[str, ...]] = {
    "attention": _ATTENTION, "delta": _HEADS, "mamba": _HEADS, "conv": ("v", "input", "gate", "o"),
    "ffn": _FFN, "experts": _FFN,
}  # fmt: skip
SHARED = "shared."
_NORMS = ("norm", "post_norm", "q_norm", "k_norm", "token", "hidden")
_STEPS = {"even": (0, 2), "odd": (1, 2)}
_ENDS = ("post_norm", "layer_scale")  # vectors of the last block of a layer
_SHARED_PARTS = tuple(SHARED + name for name in _FFN)


def map_tensors(
    config: ModelConfig,
    names: Names,
    has: Callable[[str], bool],
    norm_offset: float = 0.0,
    interleaved_rope: bool = False,
    fields: Fields = MappingProxyType({}),
    dense_layers: Collection[int] | None = (),
    numbers: Numbers | None = None,
) -> Model:
    """Return the model whose references are the filled-in templates of `names`.

    A reference to a required tensor is made even if the tensor does not exist, so that reading it fails with its name.
    If the source has a head, the embedding is not tied to it, whatever the configuration says.

    Args:
        config: the model's configuration.
        names: the templates.
        has: returns True if the source has a tensor of the given name.
        norm_offset: is added to norm weights.
        interleaved_rope: True if the values of a rotary pair are next to each other in q and k.
        fields: the fields of a config.json, which say whether optional vectors exist.
        dense_layers: the numbers of the layers without experts; None: the layers without a router.
        numbers: the numbers of each layer's blocks in the source; None: all blocks of a layer have its number.
    """
    prefix = next((prefix for prefix in names.prefixes if has(prefix + names.embedding)), names.prefixes[0])
    head = next((found for found in (names.head, f"language_model.{names.head}") if has(found)), None)
    if head and config.tied:
        config = replace(config, tied=False)
    resolve = _Resolver(config, prefix, has, norm_offset, interleaved_rope, fields)
    numbers = [(layer, layer) for layer in range(config.layers)] if numbers is None else numbers
    return Model(
        config=config,
        layers=tuple(
            (
                resolve.block(kind, names.attention if kind == "attention" else names.recurrent, first),
                *(block for number in others for block in resolve.feed_forward(names, number, dense_layers)),
            )
            for kind, (first, *others) in zip(config.mixers, numbers, strict=True)
        ),
        embedding=Ref(prefix + names.embedding),
        head=None if config.tied else Ref(head or names.head),
        positions=Ref(prefix + names.positions) if names.positions else None,
        final=resolve.block("vectors", names.final, 0),
        per_layer=tuple(Ref(prefix + name) for name in names.per_layer) if config.per_layer else (),
        ignored_tensors=names.ignored_tensors,
        mtp=resolve.mtp(names, dense_layers, 1 + numbers[-1][-1]),
    )


class _Resolver:
    """A resolver of the templates of tensor names for one model."""

    def __init__(
        self,
        config: ModelConfig,
        prefix: str,
        has: Callable[[str], bool],
        norm_offset: float,
        interleaved_rope: bool,
        fields: Fields,
    ) -> None:
        self._prefix, self._has, self._norm_offset, self._fields = prefix, has, norm_offset, fields
        self._config = config
        query, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        shared = config.mixture.shared if config.mixture else 0
        self._rows = {
            "q": (0, query), "k": (query, query + kv), "v": (query + kv, query + 2 * kv),
            "gate": (0, config.intermediate), "up": (config.intermediate, 2 * config.intermediate),
            "shared.gate": (0, shared), "shared.up": (shared, 2 * shared),
            "first": (0, config.hidden), "second": (config.hidden, 2 * config.hidden),
            "third": (2 * config.hidden, 3 * config.hidden),
        }  # fmt: skip
        self._heads = dict.fromkeys(("q", "k"), HeadOrder.from_interleaved(config.head_dim)) if interleaved_rope else {}

    def block(self, kind: BlockKind, templates: Mapping[str, str], layer: int) -> BlockRefs:
        parts = PARTS.get(kind, ())
        found = {name: self._ref(name, template, layer) for name, template in templates.items()}
        present = {name: ref for name, ref in found.items() if ref is not None}
        return BlockRefs(
            kind=kind,
            parts=tuple((name, present[name]) for name in parts if name in present),
            vectors=tuple((name, ref) for name, ref in present.items() if name not in parts),
        )

    def mtp(self, names: Names, dense_layers: Collection[int] | None, layer: int) -> MtpRefs | None:
        """Return references to the layer for multi-token prediction; None if the source has no such layer.

        `layer` is the number of this layer in the source: the number of the last other layer plus 1. If the layer has
        names of its own, it has experts if the source has a router for it.
        """
        if names.apart is not None:
            apart = copy(self)
            apart._prefix = ""
            return apart.mtp(names.apart, None, layer)
        wanted = {name: self._prefix + text for name, text in names.mtp.items()}
        if not wanted or not all(self._has(text.format(i=layer)) for text in wanted.values()):
            return None
        blocks = self.block("attention", names.attention, layer), *self.feed_forward(names, layer, dense_layers)
        norms = {name: text for name, text in names.mtp.items() if name != "projection"}
        projection = Ref(wanted["projection"].format(i=layer))
        return MtpRefs(blocks, projection, self.block("vectors", norms, layer))

    def feed_forward(self, names: Names, layer: int, dense_layers: Collection[int] | None) -> tuple[BlockRefs, ...]:
        """Return references to the tensors of a layer's feed-forward block, its block of experts, or both."""
        if names.experts is None or self._config.mixture is None:
            return (self.block("ffn", names.ffn, layer),)
        mixture = self._config.mixture
        if self._config.parallel_experts:  # the experts end the layer
            dense = {name: text for name, text in names.ffn.items() if name not in _ENDS}
            return self.block("ffn", dense, layer), self._experts(names.experts, layer, mixture)
        router = self._prefix + names.experts["router"].format(i=layer)
        if layer in dense_layers if dense_layers is not None else not self._has(router):
            return (self.block("ffn", names.ffn, layer),)
        return (self._experts(names.experts, layer, mixture),)

    def _experts(self, templates: Mapping[str, str], layer: int, mixture: Mixture) -> BlockRefs:
        routed = {name: templates[name] for name in PARTS["experts"] if name in templates}
        others = {name: text for name, text in templates.items() if name not in routed}
        rest = {name: text for name, text in others.items() if mixture.shared or not name.startswith(SHARED)}
        block = self.block("experts", rest, layer)
        shared = tuple((name.removeprefix(SHARED), ref) for name, ref in block.vectors if name in _SHARED_PARTS)
        return BlockRefs(
            kind="experts",
            parts=shared,
            vectors=tuple((name, ref) for name, ref in block.vectors if name not in _SHARED_PARTS),
            experts=tuple(
                tuple((name, self._required(name, text, layer, expert)) for name, text in routed.items())
                for expert in range(mixture.experts)
            ),
        )

    def _required(self, name: str, template: str, layer: int, expert: int) -> Ref:
        ref = self._ref(name, template, layer, expert)
        assert ref is not None  # an expert's matrices are never optional
        return ref

    def _ref(self, name: str, template: str, layer: int, expert: int = 0) -> Ref | None:
        text, optional, flag = self._present(template, layer, expert).partition("?")
        base, _, fused = text.partition("[")
        tensor = self._prefix + base.format(i=layer, e=expert)
        if optional and not (self._fields[flag] if flag else self._has(tensor)):
            return None
        rows = self._rows_of(name, fused.rstrip("]"), expert) if fused.rstrip("]") not in ("", *_STEPS) else None
        add = self._norm_offset if name in _NORMS else 0.0
        transposed = fused == "expert.transposed]"
        step = _STEPS.get(fused.rstrip("]").removeprefix("expert."), (0, 1))
        return Ref(tensor, rows, add, transposed, step, self._heads.get(name.removesuffix(".bias")))

    def _present(self, template: str, layer: int, expert: int) -> str:
        """Return the first alternative of a template whose tensor exists, or the first one if none exists."""
        first, *others = template.split("|")
        for text in (first, *others) if others else ():
            name = text.partition("?")[0].partition("[")[0]
            if self._has(self._prefix + name.format(i=layer, e=expert)):
                return text
        return first

    def _rows_of(self, name: str, which: str, expert: int) -> tuple[int, int]:
        """Return the range of rows of a part in a fused or stacked tensor; `which` is the text in brackets."""
        if not which.startswith("expert"):
            return self._rows[which]
        mixture = self._config.mixture
        width = mixture.width if mixture else 0
        if which in ("expert.even", "expert.odd"):
            return 2 * expert * width, 2 * (expert + 1) * width
        if which in ("expert.gate", "expert.up"):
            begin = 2 * expert * width + (width if which == "expert.up" else 0)
            return begin, begin + width
        size = self._config.hidden if name == "down" and which != "expert.transposed" else width
        return expert * size, (expert + 1) * size


def int_field(fields: Fields, key: str, default: int | None = None) -> int:
    """Return the whole number in the field `key`, or `default` if it is missing or null.

    Raises:
        ModelError: if it is missing and there is no default, or if it is not a whole number.
    """
    value = fields.get(key)
    value = default if value is None else value
    if type(value) is not int:
        raise ModelError(f"{key} is {repr(value)[:80]} in the model's configuration; a whole number is expected")
    return value


def size_field(fields: Fields, key: str, default: int | None = None) -> int:
    """Return the size in the field `key`, from 1 to 2^24, or `default` if it is missing or null.

    Raises:
        ModelError: if it is missing and there is no default, or if it is not a whole number in this range.
    """
    value = int_field(fields, key, default)
    if not 1 <= value <= 1 << 24:
        raise ModelError(f"{key} is {value} in the model's configuration; a number from 1 to {1 << 24} is expected")
    return value


def float_field(fields: Fields, key: str, default: float | None = None) -> float:
    """Return the number in the field `key` as a float, or `default` if it is missing or null.

    Raises:
        ModelError: if it is missing and there is no default, or if it is not a number.
    """
    value = fields.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > _LARGEST:
        raise ModelError(f"{key} is {str(value)[:80]!r} in the model's configuration; a number is expected")
    return float(value)


def activation(name: object) -> Activation:
    """Return the activation that a config.json calls `name`.

    Raises:
        ModelError: if it is not supported.
    """
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ModelError(f"the activation {repr(name)[:80]} is not supported; supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]
