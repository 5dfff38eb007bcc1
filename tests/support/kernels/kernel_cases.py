"""Random packed blocks, and both implementations of the kernels, for the kernels' tests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from tpi.config import Activation, Format
from tpi.kernels.kv import KvDtype, KvPages
from tpi.kernels.native import NativeKernels
from tpi.kernels.normspec import NormKind
from tpi.kernels.paged import decode_keys, decode_kv, encode_keys, encode_kv
from tpi.kernels.reference import ReferenceKernels
from tpi.kernels.spec import F32, PAGE_TOKENS, U8, AttentionSpec, Batch, FfnSpec, KvArray, NormSpec
from tpi.pack.builder.quantise import assemble, encode_part
from tpi.pack.layout import RECORDS, Layout, Part, RunLayout, RunName, is_quantised

Random = np.random.Generator
native, reference = NativeKernels(), ReferenceKernels()
FORMATS: list[Format] = list(get_args(Format))
PACKS: list[tuple[Format, Layout]] = [
    *((format, "record") for format in RECORDS),
    *((format, "tiled") for format in FORMATS if is_quantised(format)),
]
_TOLERANCE: dict[Format, float] = {"f32": 5e-6, "bf16": 5e-6, "f16": 5e-6, "q8": 1e-4}


def tolerance(format: Format) -> float:
    """Return the largest error, as a share of the largest value: an activation may round to the neighbouring int8."""
    return _TOLERANCE.get(format, 4e-3)


def normal(random: Random, *shape: int, scale: float = 1.0) -> F32:
    return (random.normal(size=shape) * scale).astype(np.float32)


def layout_of(format: Format) -> Layout:
    """Return the layout of dense packs: tiles if the format has groups."""
    return "tiled" if is_quantised(format) else "record"


def pack(
    random: Random, name: RunName, layout: Layout, parts: list[Part], width: int, hidden: int, units: int
) -> tuple[RunLayout, U8]:
    """Return a run of random weights, and its bytes as a 1-D array."""
    run = RunLayout(name, layout, tuple(parts), width, hidden, units)
    encoded = {
        part.name: encode_part(part, run, normal(random, units * width, hidden, scale=hidden**-0.5)) for part in parts
    }
    return run, assemble(run, encoded).reshape(-1)


def norm_spec(random: Random, kind: NormKind, hidden: int) -> NormSpec:
    """Return the spec of a random norm; a LayerNorm has a bias."""
    if kind == "none":
        return NormSpec(kind, 1e-5, np.empty(0, np.float32))
    return NormSpec(kind, 1e-5, normal(random, hidden), normal(random, hidden) if kind == "layer" else None)


@dataclass(frozen=True)
class AttentionCase:
    spec: AttentionSpec
    data: U8
    x: F32
    kv: KvPages
    batch: Batch


def attention_case(
    random: Random,
    *,
    format: Format = "f32",
    layout: Layout | None = None,
    kv_format: Format | None = None,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    lengths: tuple[tuple[int, int], ...] = ((0, 5),),
    kv_dtype: KvDtype = "f32",
    norm: NormKind = "rms",
    bias: bool = False,
    qk_norm: bool = False,
    late_norms: bool = False,
    rotary: int | None = None,
    softcap: float = 0.0,
    window: int = 0,
) -> AttentionCase:
    """Return a random attention block. `lengths` has (tokens in the cache, tokens of this step) per sequence."""
    chosen = layout or layout_of(format)
    grouped = chosen == "tiled"
    query_heads = next(n for n in (1, 2, 4, 8, 16, 32) if not grouped or n * head_dim % 32 == 0)
    kv_unit = next(n for n in (1, 2, 4, 8) if not grouped or n * head_dim % 8 == 0)
    query_parts = [Part("q", format, "row"), Part("o", format, "column")]
    kv_parts = [Part("k", kv_format or format, "row"), Part("v", format, "row")]
    query, query_data = pack(
        random, "query", chosen, query_parts, query_heads * head_dim, hidden, -(-heads // query_heads)
    )
    kv, kv_data = pack(random, "kv", chosen, kv_parts, kv_unit * head_dim, hidden, -(-kv_heads // kv_unit))
    half = (head_dim if rotary is None else rotary) // 2
    spec = AttentionSpec(
        query=query,
        kv=kv,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        kv_index=np.sort(random.integers(0, kv_heads, heads)).astype(np.int32),
        norm=norm_spec(random, norm, hidden),
        q_bias=normal(random, heads * head_dim) if bias else None,
        k_bias=normal(random, kv_heads * head_dim) if bias else None,
        v_bias=normal(random, kv_heads * head_dim) if bias else None,
        q_norm=normal(random, head_dim) if qk_norm else None,
        k_norm=normal(random, head_dim) if qk_norm else None,
        inv_freq=(10000.0 ** -(np.arange(half) / max(half, 1))).astype(np.float32),
        rope_scale=1.1,
        attention_scale=head_dim**-0.5,
        softcap=softcap,
        window=window,
        late_norms=late_norms,
    )
    batch, kv_cache = _batch(random, lengths, kv_heads, head_dim, kv_dtype)
    x = normal(random, len(batch.positions), hidden)
    return AttentionCase(spec, np.concatenate([query_data, kv_data]), x, kv_cache, batch)


def _batch(
    random: Random, lengths: tuple[tuple[int, int], ...], kv_heads: int, head_dim: int, dtype: KvDtype
) -> tuple[Batch, KvPages]:
    """Return a batch of sequences whose pages lie in random order, with random keys and values in the cache."""
    blocks = [-(-(past + new) // PAGE_TOKENS) for past, new in lengths]
    order = random.permutation(sum(blocks) + 3)
    tables = np.full((len(lengths), max(blocks) + 1), -1, np.int32)
    for row, count in enumerate(blocks):
        tables[row, :count] = order[sum(blocks[:row]) :][:count]
    kv = KvPages.allocate([0], len(order), kv_heads, head_dim, dtype)
    for cache, encode in ((kv.keys[0], encode_keys), (kv.values[0], encode_kv)):
        cache[...] = encode(normal(random, *cache.shape[:-1], head_dim), cache.dtype)
    positions = np.concatenate([np.arange(past, past + new) for past, new in lengths]).astype(np.int32)
    sequence = np.repeat(np.arange(len(lengths)), [new for _, new in lengths]).astype(np.int32)
    return Batch(positions, sequence, tables), kv


def assert_same_caches(mine: Sequence[KvArray], theirs: Sequence[KvArray], head_dim: int, tolerance: float) -> None:
    """Check that the keys differ, and the values differ, by at most `tolerance` of the largest plus one rounding step.

    `mine` and `theirs` are the keys and the values of one layer.
    """
    for one, other, decode in zip(mine, theirs, (decode_keys, decode_kv), strict=True):
        assert one.dtype == other.dtype
        _assert_close_vectors(decode(one, head_dim), decode(other, head_dim), one.dtype, tolerance)


def _assert_close_vectors(found: F32, expected: F32, element: np.dtype[Any], tolerance: float) -> None:
    off = np.abs(found - expected)
    steps = {np.dtype(np.float16): 1e-3, np.dtype(np.int8): 2 / 127, np.dtype(np.uint8): 1 / 15}  # of a vector's range
    range_of = (expected.max(axis=-1) - expected.min(axis=-1))[..., None]
    allowed = tolerance * np.abs(expected).max() + 1.01 * steps.get(element, 0.0) * range_of
    assert (off <= allowed).all(), f"off by {off.max()}"


@dataclass(frozen=True)
class FfnCase:
    spec: FfnSpec
    data: U8
    x: F32


def ffn_case(
    random: Random,
    *,
    format: Format = "f32",
    layout: Layout | None = None,
    down: Format | None = None,
    hidden: int = 64,
    units: int = 3,
    width: int = 32,
    tokens: int = 1,
    gated: bool = True,
    activation: Activation = "silu",
    norm: NormKind = "rms",
    bias: bool = False,
) -> FfnCase:
    """Return a random feed-forward block, and its input."""
    rows = [Part(name, format, "row") for name in (("gate", "up") if gated else ("up",))]
    parts = [*rows, Part("down", down or format, "column")]
    run, data = pack(random, "neuron", layout or layout_of(format), parts, width, hidden, units)
    spec = FfnSpec(
        neuron=run,
        activation=activation,
        gated=gated,
        norm=norm_spec(random, norm, hidden),
        gate_bias=normal(random, units * width) if bias and gated else None,
        up_bias=normal(random, units * width) if bias else None,
    )
    return FfnCase(spec, data, normal(random, tokens, hidden))
