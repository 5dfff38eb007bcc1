"""Byte layout of packed weights: formats, parts, runs and units. All offsets and sizes inside a unit come from here.

A block is stored as *runs* of equal *units*. A unit holds `width` vectors of length `hidden` for each of its *parts*:
rows (q, k, v, gate, up, vocabulary rows) or columns (o, down). There are two layouts:

- `record`: record r is part0 vector r | part1 vector r | ...; one part has a uniform stride over all units.
- `tiled`: part0 | part1 | ...; each part in tiles of 8 outputs x 32 inputs, in the order that the native kernels read.

Both take the same number of bytes. Quantised vectors are in groups of 32 values, so `hidden` must be a multiple of 32.
"""

from dataclasses import dataclass
from typing import Any, Literal

from tpi.config import BlockKind as BlockKind
from tpi.config import Format, ModelConfig
from tpi.errors import ModelError
from tpi.partition import FFN_UNIT

GROUP = 32  # values that share one scale
TILE_OUTPUTS = 8

GROUP_BYTES: dict[Format, int] = {
    "f32": 4 * GROUP,
    "bf16": 2 * GROUP,
    "f16": 2 * GROUP,
    "q8": GROUP + 2,  # int8 codes, f16 scale:            w = scale * code
    "q4": GROUP // 2 + 4,  # 4-bit codes, f16 scale, f16 minimum: w = scale * code + minimum
    "q4s": GROUP // 2 + 2,  # 4-bit codes, f16 scale:       w = scale * (code - 8)
    "mxfp4": GROUP // 2 + 1,  # e2m1 values, e8m0 scale (a power of two) (OCP Microscaling 1.0)
    "q6": 24 + 4,  # 6-bit codes; f16 scale, and an int8 factor for each half of the group
    "q5": 20 + 4,  # 5-bit codes, f16 scale, f16 minimum
    "q3": 12 + 4,  # 3-bit codes; scale and factors as in q6
    "q2": 8 + 6,  # 2-bit codes; f16 scale and minimum, and a 4-bit factor of each for each half
    "iq4": 16 + 2,  # 4-bit codes into a table of 16 values, f16 scale
    "iq3s": 16 + 2,  # the same with another table
    "iq3": 16 + 2,  # the same with another table
    "iq2": 12 + 4,  # 3-bit codes into a table of 6 values; scale and factors as in q6
    "iq1": 12 + 4,  # the same with another table
    "nvfp4": 16 + 4,  # e2m1 values; scale and factors as in q6
}
RECORDS: tuple[Format, ...] = ("f32", "bf16", "f16", "q8", "q4", "q4s")  # formats that the record layout supports

RunName = Literal["latent", "query_latent", "query_up", "query", "kv", "value", "key", "neuron", "shared", "row"]
WHOLE_RUNS: tuple[RunName, ...] = ("latent", "query_latent")  # held in full by each node with a query head
Layout = Literal["record", "tiled"]
Axis = Literal["row", "column"]


def is_quantised(format: Format) -> bool:
    """Return True if the format stores groups of 32 codes with a scale."""
    return format not in ("f32", "bf16", "f16")


@dataclass(frozen=True)
class Part:
    """One matrix of a unit: `width` vectors of length `hidden`."""

    name: str
    format: Format
    axis: Axis

    def vector_bytes(self, hidden: int) -> int:
        """Return the size in bytes of one vector of `hidden` values."""
        if self.format == "f32":
            return 4 * hidden
        if not is_quantised(self.format):
            return 2 * hidden
        return hidden // GROUP * GROUP_BYTES[self.format]


@dataclass(frozen=True)
class RunLayout:
    """A run of equal units: `[units, unit_bytes]` bytes, on disk and in memory.

    `width` is the number of vectors of each part in a unit. `units` is the number of units of the whole, unsharded run.
    """

    name: RunName
    layout: Layout
    parts: tuple[Part, ...]
    width: int
    hidden: int
    units: int

    def __post_init__(self) -> None:
        if any(is_quantised(part.format) for part in self.parts) and self.hidden % GROUP:
            raise ModelError(f"a hidden size of {self.hidden} is not a multiple of {GROUP}; use --dtype f32 or bf16")
        for part in self.parts:
            if self.layout == "record" and part.format not in RECORDS:
                raise ModelError(f"weights in {part.format} cannot be stored neuron by neuron; use --dtype q8 or q4")

    @property
    def record_bytes(self) -> int:
        """Size in bytes of one vector of each part together: the stride between records in the `record` layout."""
        return sum(part.vector_bytes(self.hidden) for part in self.parts)

    @property
    def unit_bytes(self) -> int:
        """Size of one unit in bytes."""
        return self.width * self.record_bytes

    @property
    def nbytes(self) -> int:
        """Size of all units in bytes."""
        return self.units * self.unit_bytes

    def part_offset(self, name: str) -> int:
        """Return the offset in bytes of the part's first vector (`record`) or first tile (`tiled`) inside a unit.

        Raises:
            KeyError: if the run has no such part.
        """
        offset = 0
        for part in self.parts:
            if part.name == name:
                return offset if self.layout == "record" else offset * self.width
            offset += part.vector_bytes(self.hidden)
        raise KeyError(name)

    def part(self, name: str) -> Part:
        """Return the part called `name`.

        Raises:
            KeyError: if the run has no such part.
        """
        return {part.name: part for part in self.parts}[name]

    def to_dict(self) -> dict[str, Any]:
        """Return the layout as plain types, for JSON and msgpack."""
        parts = [[part.name, part.format, part.axis] for part in self.parts]
        return {"name": self.name, "layout": self.layout, "parts": parts, "width": self.width,
                "hidden": self.hidden, "units": self.units}  # fmt: skip

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "RunLayout":
        """Build a layout from the fields that `to_dict` returns."""
        return cls(**{**fields, "parts": tuple(Part(*part) for part in fields["parts"])})


@dataclass(frozen=True)
class RunShape:
    """Shape that a model requires of a run; the manifest is checked against it.

    `vectors` is the number of vectors of each part before padding, or None for any number. `hidden` is their length.
    The number of vectors in a unit must be a multiple of `step`.
    """

    vectors: int | None
    step: int
    hidden: int


def attention_shapes(config: ModelConfig) -> dict[RunName, RunShape]:
    """Return the shape of each run of the attention block of a layer, by name, in the order in which they are stored.

    `config` is that of the layer (`ModelConfig.at_layer`).
    """
    own = RunShape(config.heads * config.head_dim, config.head_dim, config.hidden)
    kv = RunShape(config.kv_heads * config.kv_width, config.kv_width, config.kv_hidden)
    if config.latent is None:
        return {"query": own} if config.shared_kv else {"query": own, "kv": kv}
    latent = RunShape(config.latent_values, FFN_UNIT, config.hidden)
    if not config.query_rank:
        return {"latent": latent, "query": own, "kv": kv}
    return {
        "latent": latent,
        "query_latent": RunShape(config.query_rank, FFN_UNIT, config.hidden),
        "query_up": RunShape(own.vectors, own.step, config.query_rank),
        "query": own,
        "kv": kv,
    }


def attention_parts(config: ModelConfig) -> dict[RunName, tuple[str, ...]]:
    """Return the names of the parts of each run of the model's attention blocks, by the run's name."""
    gate = ("gate",) if config.output_gate else ()
    found: dict[RunName, tuple[str, ...]] = {"query": ("q", *gate, "o"), "kv": ("k", "v")}
    if config.latent is not None:
        found |= {"latent": ("latent",)}
    if config.query_rank:
        found |= {"query_latent": ("q_latent",), "query_up": ("q",), "query": ("o",)}
    return found


STACKED_NORMS = ("dense_norm", "layer_norm")
"""Vectors of a block of experts that shares one sum with a dense FFN: the norms of the FFN's result and of both."""


def per_layer_vectors(config: ModelConfig) -> dict[str, int]:
    """Return the lengths of the vectors for per-layer embeddings, by name. The last block of each layer has them.

    The result is empty for models without per-layer embeddings.
    """
    matrix = config.per_layer * config.hidden
    if not matrix:
        return {}
    return {"per_layer.gate": matrix, "per_layer.projection": matrix, "per_layer.norm": config.hidden}


def recurrent_shapes(config: ModelConfig) -> dict[BlockKind, dict[RunName, RunShape]]:
    """Return the shapes of the runs of the model's recurrent blocks: for each kind of block, by the run's name.

    The runs are in the order in which they are stored.
    """
    heads, found = config.state_heads, dict[BlockKind, dict[RunName, RunShape]]()
    if heads is not None:
        found["delta" if config.delta else "mamba"] = {
            "value": RunShape(heads.heads * heads.value, heads.unit_heads * heads.value, config.hidden),
            "key": RunShape(heads.key_heads * heads.key, heads.key, config.hidden),
        }
    if config.conv_taps:
        found["conv"] = {"value": RunShape(config.hidden, FFN_UNIT, config.hidden)}
    return found


def recurrent_vectors(config: ModelConfig, kind: BlockKind) -> dict[str, int]:
    """Return the lengths of the vectors of a recurrent block by name, without the norm of its input."""
    heads, hidden = config.state_heads, config.hidden
    if kind == "conv":
        return {"conv": hidden * config.conv_taps}
    if kind not in ("delta", "mamba") or heads is None:
        return {}
    channels = {"q": heads.key_heads * heads.key, "k": heads.key_heads * heads.key, "v": heads.heads * heads.value}
    found = dict.fromkeys(("decay", "decay.log", "decay.bias"), heads.heads) | {"a": heads.heads * hidden}
    found |= {f"conv.{name}": count * heads.taps for name, count in channels.items()}
    if kind == "delta":
        return found | {"b": heads.heads * hidden, "out_norm": heads.value}
    biases = {f"conv.{name}.bias": count for name, count in channels.items()}
    return found | biases | {"skip": heads.heads, "out_norm": heads.heads * heads.value}


def query_unit_heads(config: ModelConfig, quantised: bool) -> int:
    """Return the number of query heads in a unit, the same in every layer.

    If quantised, the o columns must fill whole groups of 32.
    """
    return _fewest_heads(config, config.head_dim, GROUP) if quantised else 1


def kv_unit_heads(config: ModelConfig, quantised: bool) -> int:
    """Return the number of KV heads in a unit, the same in every layer.

    If quantised, the k and v rows must fill whole tiles of 8.
    """
    return _fewest_heads(config, config.kv_width, TILE_OUTPUTS) if quantised else 1


def _fewest_heads(config: ModelConfig, width: int, multiple: int) -> int:
    """Return the fewest heads of `width` vectors whose vectors are together a multiple of `multiple`.

    In models with `full_heads`, the number suffices for those heads too.
    """
    widths = (width, config.full_heads.head_dim) if config.full_heads else (width,)
    return max(fewest_heads(each, multiple) for each in widths)


def ffn_units(neurons: int) -> int:
    """Return the number of units of a feed-forward network or an expert; the last is padded with zero neurons."""
    return -(-neurons // FFN_UNIT)


def fewest_heads(head_dim: int, multiple: int) -> int:
    """Return the smallest power of two of heads whose vectors are together a multiple of `multiple`."""
    heads = 1
    while heads * head_dim % multiple:
        heads *= 2
    return heads
