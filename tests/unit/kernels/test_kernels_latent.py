"""Keys and values from a latent vector: native kernels compared with the reference, and this with the formula."""

from dataclasses import replace
from typing import TypeAlias

import numpy as np
import pytest

from tests.support.kernels.isas import over_isas
from tests.support.kernels.kernel_cases import (
    AttentionCase,
    assert_same_caches,
    attention_case,
    native,
    norm_spec,
    normal,
    pack,
    reference,
)
from tpi.config import Format
from tpi.errors import KernelError
from tpi.kernels.kv import KvArray, KvDtype
from tpi.kernels.spec import F32, AttentionSpec, LatentSpec, QueryLatentSpec
from tpi.pack.layout import Layout, Part, is_quantised

Lengths: TypeAlias = tuple[tuple[int, int], ...]
LENGTHS: tuple[Lengths, ...] = (((0, 5),), ((300, 1),), ((40, 1), (3, 1)), ((0, 70),), ((130, 30), (7, 2)))
pytestmark = pytest.mark.usefixtures("isa")


def latent_case(
    format: Format = "f32",
    *,
    lengths: Lengths = ((0, 5),),
    kv_dtype: KvDtype = "f32",
    own: int = 24,
    rope: int = 8,
    value: int = 16,
    rank: int = 96,
    biased: bool = False,
    query_rank: int = 0,
) -> AttentionCase:
    """Return a block of four heads with keys of their own.

    Vectors beyond a head's `own` values, or its value's, are random; they must not count, or must count as zeros would.
    """
    random = np.random.default_rng(rank + own)
    size, heads, width = own + rope, 4, max(own, value)
    case = attention_case(
        random, format=format, heads=heads, kv_heads=heads, head_dim=size, rotary=rope, lengths=lengths,
        kv_dtype=kv_dtype,
    )  # fmt: skip
    layout: Layout = "tiled" if is_quantised(format) else "record"
    kv, kv_data = pack(random, "kv", layout, [Part("k", format, "row"), Part("v", format, "row")], width, rank, heads)
    run, data = pack(random, "latent", layout, [Part("latent", format, "row")], 32, 64, -(-(rank + rope) // 32))
    bias = normal(random, rank + rope) if biased else None
    latent = LatentSpec(run, norm_spec(random, "rms", rank), rope, width, bias)
    index = np.arange(heads, dtype=np.int32)
    spec = replace(case.spec, kv=kv, kv_index=index, latent=latent)
    query = case.data[: case.spec.query.units * case.spec.query.unit_bytes]
    if query_rank:
        made = with_query_latent(case, spec, query_rank, biased)
        return replace(made, data=np.concatenate([data, made.data, kv_data]))
    return replace(case, spec=spec, data=np.concatenate([data, query, kv_data]))


def with_query_latent(case: AttentionCase, spec: AttentionSpec, rank: int, biased: bool) -> AttentionCase:
    """Return the case with queries from a latent vector of their own; its data lacks the runs `latent` and `kv`."""
    random, old = np.random.default_rng(rank), case.spec.query
    format = old.parts[0].format
    layout: Layout = old.layout
    run, data = pack(random, "query_latent", layout, [Part("q_latent", format, "row")], 32, 64, -(-rank // 32))
    up, up_data = pack(random, "query_up", layout, [Part("q", format, "row")], old.width, rank, old.units)
    query, o_data = pack(random, "query", layout, [Part("o", format, "column")], old.width, 64, old.units)
    bias = normal(random, rank) if biased else None
    latent = QueryLatentSpec(run, up, norm_spec(random, "rms", rank), bias)
    made = replace(spec, query=query, query_latent=latent)
    return replace(case, spec=made, data=np.concatenate([data, up_data, o_data]))


def caches(case: AttentionCase) -> tuple[KvArray, KvArray]:
    return case.kv.keys[0].copy(), case.kv.values[0].copy()


def error(got: F32, expected: F32) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


@over_isas(("format", "lengths", "query_rank"), ["f32", "bf16", "q8", "q4"], LENGTHS, [0, 32])
def test_native_kernels_compute_what_the_reference_says(format: Format, lengths: Lengths, query_rank: int) -> None:
    case = latent_case(format, lengths=lengths, biased=len(lengths) > 1, query_rank=query_rank)
    mine, theirs = caches(case), caches(case)
    got = native.attention(case.spec, case.data, case.x, *mine, case.batch)
    expected = reference.attention(case.spec, case.data, case.x, *theirs, case.batch)
    tolerance = 2e-2 if is_quantised(format) else 2e-5
    assert error(got, expected) < tolerance
    assert_same_caches(mine, theirs, case.spec.head_dim, tolerance)


@over_isas(("kv_dtype",), ["f16", "q8", "q4"])
def test_every_format_of_the_cache(kv_dtype: KvDtype) -> None:
    case = latent_case(lengths=((130, 30), (7, 2)), kv_dtype=kv_dtype)
    mine, theirs = caches(case), caches(case)
    got = native.attention(case.spec, case.data, case.x, *mine, case.batch)
    assert error(got, reference.attention(case.spec, case.data, case.x, *theirs, case.batch)) < 1e-2


@over_isas(("sizes", "tokens", "query_rank"), [(8, 24, 8), (24, 8, 32), (24, 8, 4)], [1, 40], [0, 40])
def test_steps_have_the_bits_of_one_call(sizes: tuple[int, int, int], tokens: int, query_rank: int) -> None:
    own, rope, value = sizes
    case = latent_case(lengths=((3, tokens),), own=own, rope=rope, value=value, query_rank=query_rank)
    once, stepped = caches(case), caches(case)
    expected = native.attention(case.spec, case.data, case.x, *once, case.batch)
    prepared = native.prepare(case.spec, case.x)
    heads = native.project(case.spec, case.data, prepared, case.batch.positions)
    mixed = native.attend(case.spec, heads, *stepped, case.batch)
    np.testing.assert_array_equal(native.output(case.spec, case.data, mixed), expected)
    assert not heads.values[..., max(own, value) :].any()
    assert error(expected, reference.attention(case.spec, case.data, case.x, *once, case.batch)) < 2e-5


def test_keys_share_what_is_rotated_and_the_formula_holds() -> None:
    """Computed in float64: c = norm(W x), k = [rope(W_r x) | W_k c], v = W_v c."""
    case = latent_case(biased=True)
    spec, latent = case.spec, case.spec.latent
    assert latent is not None
    heads = reference.project(spec, case.data, case.x, case.batch.positions)
    np.testing.assert_array_equal(heads.keys[:, :1, : latent.rope], heads.keys[:, 1:2, : latent.rope])
    end = latent.run.units * latent.run.unit_bytes
    kv_data = case.data[end + spec.query.units * spec.query.unit_bytes :]
    x = reference.norm(spec.norm, case.x).astype(np.float64)
    weights = reference.dequantise(latent.run, case.data[:end], "latent")[: latent.rank + latent.rope]
    z = x @ weights.T + (0 if latent.bias is None else latent.bias)
    c = z[:, : latent.rank]
    c = c / np.sqrt(np.mean(c**2, axis=1, keepdims=True) + latent.norm.eps) * latent.norm.weight
    for part, found in (("k", heads.keys[..., latent.rope :]), ("v", heads.values)):
        rows = reference.dequantise(spec.kv, kv_data, part).reshape(spec.kv_heads, latent.width, -1)
        expected = np.einsum("tr,hdr->thd", c, rows)[..., : found.shape[-1]]
        np.testing.assert_allclose(found[..., : expected.shape[-1]], expected, atol=1e-5)


def test_queries_come_from_their_normed_latent() -> None:
    """Computed in float64: q = W_b norm(W_a x + bias), before RoPE."""
    case = latent_case(biased=True, query_rank=40)
    spec, latent, own = case.spec, case.spec.latent, case.spec.query_latent
    assert latent is not None
    assert own is not None
    assert own.bias is not None
    begin = latent.run.units * latent.run.unit_bytes
    middle = begin + own.run.units * own.run.unit_bytes
    x = reference.norm(spec.norm, case.x).astype(np.float64)
    down = reference.dequantise(own.run, case.data[begin:middle], "q_latent")[:40]
    up_data = case.data[middle : middle + own.up.units * own.up.unit_bytes]
    c = x @ down.T + own.bias
    c = c / np.sqrt(np.mean(c**2, axis=1, keepdims=True) + own.norm.eps) * own.norm.weight
    expected = (c @ reference.dequantise(own.up, up_data, "q").T).reshape(len(x), -1, spec.head_dim)
    found = reference.project(spec, case.data, case.x, case.batch.positions).queries
    np.testing.assert_allclose(found[..., latent.rope :], expected[:, : spec.heads, latent.rope :], atol=1e-5)


def test_what_does_not_fit_is_refused() -> None:
    case, other = latent_case(), latent_case(query_rank=40)
    latent, own = case.spec.latent, other.spec.query_latent
    assert latent is not None
    assert own is not None
    run = replace(own.run, units=1)
    for spec, words in (
        (replace(other.spec, query_latent=replace(own, run=replace(run, units=0))), "all of the queries' latent run"),
        (replace(other.spec, query_latent=replace(own, run=run)), "queries' latent run holds too few"),
        (replace(other.spec, query_latent=replace(own, up=replace(own.up, units=1))), "fewer vectors than the heads"),
        (replace(other.spec, q_norm=np.ones(32, np.float32)), "neither biases nor norms"),
        (replace(case.spec, latent=None), "differ in hidden size"),
        (replace(case.spec, latent=replace(latent, rope=4)), "not fit the"),
        (replace(case.spec, latent=replace(latent, width=40)), "not fit the"),
        (replace(case.spec, latent=replace(latent, run=replace(latent.run, units=0))), "all of the latent run"),
        (replace(case.spec, latent=replace(latent, run=replace(latent.run, units=1))), "too few vectors"),
        (replace(case.spec, clip=1.0), "neither biases nor norms"),
    ):
        with pytest.raises(KernelError, match=words):
            native.attention(spec, case.data, case.x, *caches(case), case.batch)
