"""What a family is: a table of tensor names and a few settings. Nothing here knows any family by name.

Tensor names are templates: `{i}` is the layer, `{e}` the routed expert; `[q]` after a name takes the rows of q out of a
fused tensor, `[expert]` those of one expert out of a stack, `[expert.gate]` and `[expert.up]` those of one that are
fused besides, `[expert.even]` and `[expert.odd]` every other of its rows, `[expert.turned]` those of a stack in which
each expert is transposed; `[even]` and `[odd]` every other value of a vector; `?` at the end marks a vector that
some models of the family lack, `?field` one that is there exactly if the configuration's `field` is true.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tpi.config import Activation, BlockKind, ModelConfig
from tpi.errors import ModelError
from tpi.sources.heads import HeadOrder

Fields = Mapping[str, Any]  # a config.json, or the metadata of a GGUF file


@dataclass(frozen=True)
class Ref:
    """One matrix or vector of the model in its source.

    `rows` is its range of rows in a fused tensor, `heads` which vectors of each head there it has, in its order (None:
    all of them). `add` is added to each value.
    """

    tensor: str
    rows: tuple[int, int] | None = None
    add: float = 0.0
    turned: bool = False  # the tensor has as rows what are columns of the matrix
    step: tuple[int, int] = (0, 1)  # of the vectors that are there, from which on it has every how many
    heads: HeadOrder | None = None


@dataclass(frozen=True)
class BlockRefs:
    """Where the matrices (by part name) and the vectors of one block are."""

    kind: BlockKind
    parts: tuple[tuple[str, Ref], ...]  # of a block of experts: those of its shared ones
    vectors: tuple[tuple[str, Ref], ...]
    experts: tuple[tuple[tuple[str, Ref], ...], ...] = ()  # the parts of each routed expert


@dataclass(frozen=True)
class PredictorRefs:
    """Where the two matrices of a layer's predictor are, and the score from which a neuron counts as active."""

    layer: int
    first: str  # tensor of `[rank, hidden]`
    second: str  # `[neurons, rank]`
    threshold: float


@dataclass(frozen=True)
class Model:
    """A model in its source: its configuration and where each of its tensors is."""

    config: ModelConfig
    layers: tuple[tuple[BlockRefs, ...], ...]  # the blocks of each, in order of use
    embedding: Ref
    head: Ref | None  # None: tied to the embedding
    positions: Ref | None
    final: BlockRefs
    notes: tuple[str, ...] = ()  # what the user should know of it, in sentences
    predictors: tuple["PredictorRefs", ...] = ()  # that the source has beside the layers
    marks: Path | None = None  # a file of PowerInfer's that says which neurons are for a GPU: the source, or another
    accounted: tuple[
        str, ...
    ] = ()  # further tensors that need no place, as fnmatch patterns: see tpi.pack.builder.claims


@dataclass(frozen=True)
class Names:
    """Tensor name templates, without the prefix that all names but the head's share."""

    embedding: str
    attention: Mapping[str, str]  # part or vector name -> template; one-letter names and gate, up, down are matrices
    ffn: Mapping[str, str]
    final: Mapping[str, str]
    head: str  # after "" or "language_model.", wherever it exists
    positions: str | None = None
    prefixes: tuple[str, ...] = ("",)  # the first with which the embedding exists is taken
    accounted: tuple[str, ...] = ()  # patterns of whole names that are read elsewhere, or hold nothing
    experts: Mapping[str, str] | None = None  # in place of `ffn` where a layer has experts; `shared.` what all use


@dataclass(frozen=True)
class Family:
    """One model family.

    `settings` gives the ModelConfig fields that differ from Llama's; `fold` is added to norm weights (Gemma stores w
    and uses 1 + w); `interleaved` says that GGUF files of this family store rotary pairs side by side; `dense` gives
    the layers without experts, of a family whose others have some.
    """

    name: str
    architectures: tuple[str, ...] = ()  # `architectures` of a config.json
    gguf: str | None = None  # `general.architecture` of a GGUF file
    names: Names | None = None
    gguf_names: Names | None = None
    defaults: Mapping[str, Any] = field(
        default_factory=dict
    )  # what it reads of a config.json: see tpi.families.huggingface.defaults
    settings: Callable[[Fields], dict[str, Any]] = lambda fields: {}
    gguf_settings: Callable[[Fields], dict[str, Any]] = lambda fields: {}
    fold: float = 0.0
    interleaved: bool = False
    arranged: Callable[[Model, Fields], Model] = lambda model, fields: model  # what templates cannot say
    gguf_arranged: Callable[[Model, Callable[[str], bool]], Model] = lambda model, has: model  # of a GGUF file
    dense: Callable[[Fields], Collection[int]] = lambda fields: ()
    flatten: Callable[[Fields], Fields] | None = None  # from a config.json with objects and names of its own


_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "relu2": "relu2",
}  # fmt: skip
_LARGEST = 1e300  # a whole number beyond it is no float
_FFN = ("gate", "up", "down")
_ATTENTION = ("q", "o", "k", "v", "latent")
PARTS: Mapping[BlockKind, tuple[str, ...]] = {"attention": _ATTENTION, "ffn": _FFN, "experts": _FFN}
SHARED = "shared."
_NORMS = ("norm", "post_norm", "q_norm", "k_norm")
_STEPS = {"even": (0, 2), "odd": (1, 2)}
_SHARED_PARTS = tuple(SHARED + name for name in _FFN)


def map_tensors(
    config: ModelConfig,
    names: Names,
    has: Callable[[str], bool],
    fold: float = 0.0,
    interleaved: bool = False,
    fields: Fields = MappingProxyType({}),
    dense: Collection[int] | None = (),
) -> Model:
    """Fill in the templates of `names`; `has` says which tensors exist, `fields` which vectors a config.json wants.
    Required ones that do not exist are named as they should be, so that reading them fails with their name. A head of
    the file's own counts, whatever the configuration says of tying. `dense` are the layers without experts; None: those
    that have no router."""
    prefix = next((prefix for prefix in names.prefixes if has(prefix + names.embedding)), names.prefixes[0])
    head = next((found for found in (names.head, f"language_model.{names.head}") if has(found)), None)
    if head and config.tied:
        config = replace(config, tied=False)
    resolve = _Resolver(config, prefix, has, fold, interleaved, fields)
    return Model(
        config=config,
        layers=tuple(
            (resolve.block("attention", names.attention, layer), resolve.feed_forward(names, layer, dense))
            for layer in range(config.layers)
        ),
        embedding=Ref(prefix + names.embedding),
        head=None if config.tied else Ref(head or names.head),
        positions=Ref(prefix + names.positions) if names.positions else None,
        final=resolve.block("vectors", names.final, 0),
        accounted=names.accounted,
    )


class _Resolver:
    """From templates to references, for one model."""

    def __init__(
        self,
        config: ModelConfig,
        prefix: str,
        has: Callable[[str], bool],
        fold: float,
        interleaved: bool,
        fields: Fields,
    ) -> None:
        self._prefix, self._has, self._fold, self._fields = prefix, has, fold, fields
        self._config = config
        query, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self._rows = {
            "q": (0, query), "k": (query, query + kv), "v": (query + kv, query + 2 * kv),
            "gate": (0, config.intermediate), "up": (config.intermediate, 2 * config.intermediate),
        }  # fmt: skip
        self._heads = dict.fromkeys(("q", "k"), HeadOrder.halved(config.head_dim)) if interleaved else {}

    def block(self, kind: BlockKind, templates: Mapping[str, str], layer: int) -> BlockRefs:
        """The references of one block."""
        parts = PARTS.get(kind, ())
        found = {name: self._ref(name, template, layer) for name, template in templates.items()}
        present = {name: ref for name, ref in found.items() if ref is not None}
        return BlockRefs(
            kind=kind,
            parts=tuple((name, present[name]) for name in parts if name in present),
            vectors=tuple((name, ref) for name, ref in present.items() if name not in parts),
        )

    def feed_forward(self, names: Names, layer: int, dense: Collection[int] | None) -> BlockRefs:
        """The references of a layer's feed-forward block, or of its experts."""
        if names.experts is None or self._config.mixture is None:
            return self.block("ffn", names.ffn, layer)
        router = self._prefix + names.experts["router"].format(i=layer)
        if layer in dense if dense is not None else not self._has(router):
            return self.block("ffn", names.ffn, layer)
        return self._experts(names.experts, layer, self._config.mixture.experts)

    def _experts(self, templates: Mapping[str, str], layer: int, count: int) -> BlockRefs:
        routed = {name: templates[name] for name in PARTS["experts"] if name in templates}
        rest = {name: text for name, text in templates.items() if name not in routed}
        block = self.block("experts", rest, layer)
        shared = tuple((name.removeprefix(SHARED), ref) for name, ref in block.vectors if name in _SHARED_PARTS)
        return BlockRefs(
            kind="experts",
            parts=shared,
            vectors=tuple((name, ref) for name, ref in block.vectors if name not in _SHARED_PARTS),
            experts=tuple(
                tuple((name, self._required(name, text, layer, expert)) for name, text in routed.items())
                for expert in range(count)
            ),
        )

    def _required(self, name: str, template: str, layer: int, expert: int) -> Ref:
        ref = self._ref(name, template, layer, expert)
        assert ref is not None  # an expert's matrices are never optional
        return ref

    def _ref(self, name: str, template: str, layer: int, expert: int = 0) -> Ref | None:
        text, optional, flag = template.partition("?")
        base, _, fused = text.partition("[")
        tensor = self._prefix + base.format(i=layer, e=expert)
        if optional and not (self._fields[flag] if flag else self._has(tensor)):
            return None
        rows = self._rows_of(name, fused.rstrip("]"), expert) if fused.rstrip("]") not in ("", *_STEPS) else None
        add = self._fold if name in _NORMS else 0.0
        turned = fused == "expert.turned]"
        step = _STEPS.get(fused.rstrip("]").removeprefix("expert."), (0, 1))
        return Ref(tensor, rows, add, turned, step, self._heads.get(name.removesuffix(".bias")))

    def _rows_of(self, name: str, which: str, expert: int) -> tuple[int, int]:
        """The rows that a part has of a fused or stacked tensor."""
        if not which.startswith("expert"):
            return self._rows[which]
        mixture = self._config.mixture
        width = mixture.width if mixture else 0
        if which in ("expert.even", "expert.odd"):
            return 2 * expert * width, 2 * (expert + 1) * width
        if which in ("expert.gate", "expert.up"):
            begin = 2 * expert * width + (width if which == "expert.up" else 0)
            return begin, begin + width
        size = self._config.hidden if name == "down" and which != "expert.turned" else width
        return expert * size, (expert + 1) * size


def whole(fields: Fields, key: str, default: int | None = None) -> int:
    """A whole number of the fields.

    Raises:
        ModelError: if it is missing without a default, or no whole number.
    """
    value = fields.get(key)
    value = default if value is None else value
    if type(value) is not int:
        raise ModelError(f"{key} is {value!r} in the model's configuration; a whole number is expected")
    return value


def count(fields: Fields, key: str, default: int | None = None) -> int:
    """A size of the fields, from 1 to 2^24.

    Raises:
        ModelError: if it is missing without a default, or no such number.
    """
    value = whole(fields, key, default)
    if not 1 <= value <= 1 << 24:
        raise ModelError(f"{key} is {value} in the model's configuration; a number from 1 to {1 << 24} is expected")
    return value


def number(fields: Fields, key: str, default: float | None = None) -> float:
    """A number of the fields.

    Raises:
        ModelError: if it is missing without a default, or no number.
    """
    value = fields.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > _LARGEST:
        raise ModelError(f"{key} is {str(value)[:80]!r} in the model's configuration; a number is expected")
    return float(value)


def activation(name: object) -> Activation:
    """The activation that a config.json names; ModelError if it is not supported."""
    if name not in _ACTIVATIONS:
        raise ModelError(f"the activation {name!r} is not supported; supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[str(name)]
