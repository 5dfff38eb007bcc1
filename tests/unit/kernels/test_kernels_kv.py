"""Keys and values in every format: how a vector is stored, and native kernels compared with the reference."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.support.kernels.isas import each_isa, over_isas
from tests.support.kernels.kernel_cases import AttentionCase, attention_case, native, reference
from tpi.errors import KernelError
from tpi.kernels.kv import KV_DTYPES, KvDtype, KvPages, code_bytes, kv_dtype_of, page_bytes, vector_bytes
from tpi.kernels.paged import decode_keys, decode_kv, encode_keys, encode_kv, hadamard_rotate
from tpi.kernels.spec import F32, KV_GROUP, Projected

pytestmark = pytest.mark.usefixtures("isa")
HEAD_DIMS = [1, 10, 18, 32, 40, 64, 80, 96, 128]
TOLERANCE: dict[KvDtype, float] = {"f32": 2e-5, "f16": 2e-5, "q8": 5e-5, "q4": 5e-5}  # q8, q4: queries in 16 bits


def assert_attends_alike(case: AttentionCase, tolerance: float) -> None:
    """Check that the same heads give the same result and leave the same bytes in the caches."""
    expected_kv = deepcopy(case.kv)
    heads = reference.project(case.spec, case.data, case.x, case.batch.positions)
    expected = reference.attend(case.spec, heads, expected_kv.keys[0], expected_kv.values[0], case.batch)
    actual = native.attend(case.spec, heads, case.kv.keys[0], case.kv.values[0], case.batch)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * np.abs(expected).max())
    np.testing.assert_array_equal(case.kv.keys[0], expected_kv.keys[0])
    np.testing.assert_array_equal(case.kv.values[0], expected_kv.values[0])


@over_isas(("head_dim", "kv_dtype", "tokens"), HEAD_DIMS, KV_DTYPES, [1, 3, 40])
def test_head_sizes(head_dim: int, kv_dtype: KvDtype, tokens: int) -> None:
    case = attention_case(
        np.random.default_rng([1, head_dim]), heads=5, kv_heads=2, head_dim=head_dim, kv_dtype=kv_dtype, rotary=0,
        lengths=((33, tokens),),
    )  # fmt: skip
    assert_attends_alike(case, TOLERANCE[kv_dtype])


@over_isas(
    ("kv_dtype", "window", "lengths"),
    KV_DTYPES,
    [0, 1, 50],
    [((40, 1), (3, 1), (300, 1)), ((10, 45), (70, 2)), ((0, 1),)],
)
def test_several_sequences_and_windows(kv_dtype: KvDtype, window: int, lengths: tuple[tuple[int, int], ...]) -> None:
    case = attention_case(
        np.random.default_rng(2), heads=6, kv_heads=2, head_dim=64, kv_dtype=kv_dtype, window=window, lengths=lengths
    )
    assert_attends_alike(case, TOLERANCE[kv_dtype])


@over_isas(("kv_dtype", "threads"), KV_DTYPES, [1, 3])
def test_a_token_has_the_same_bits_in_any_batch(kv_dtype: KvDtype, threads: int) -> None:
    """Alone or together with other sequences, with other tokens of its sequence, or with other tasks."""
    case = attention_case(
        np.random.default_rng(7), heads=7, kv_heads=2, head_dim=48, kv_dtype=kv_dtype, rotary=0, softcap=20.0,
        lengths=((700, 1), (40, 5), (126, 4), (0, 1)),
    )  # fmt: skip
    heads = reference.project(case.spec, case.data, case.x, case.batch.positions)
    alone, before = deepcopy(case.kv), native.threads()
    native.set_threads(threads)
    try:
        together = native.attend(case.spec, heads, case.kv.keys[0], case.kv.values[0], case.batch)
        native.set_threads(1)
        for at in range(len(together)):
            one = slice(at, at + 1)
            own = Projected(heads.queries[one], heads.keys[one], heads.values[one])
            batch = replace(case.batch, positions=case.batch.positions[one], sequence=case.batch.sequence[one])
            found = native.attend(case.spec, own, alone.keys[0], alone.values[0], batch)
            np.testing.assert_array_equal(found[0], together[at])
    finally:
        native.set_threads(before)


@over_isas(("kv_dtype",), KV_DTYPES)
def test_steps_of_many_tokens_attend_in_chunks(kv_dtype: KvDtype) -> None:
    """There are as many chunks as have room; their size doubles with the position."""
    lengths = ((3000, 20), (20, 1), *[(130, 1)] * 10)
    case = attention_case(
        np.random.default_rng(8), heads=4, kv_heads=1, head_dim=32, kv_dtype=kv_dtype, rotary=0, lengths=lengths
    )
    assert_attends_alike(case, TOLERANCE[kv_dtype])


@each_isa
def test_keys_and_values_may_have_formats_of_their_own() -> None:
    case = attention_case(np.random.default_rng(3), head_dim=32, lengths=((70, 1),), kv_dtype="q4")
    keys = attention_case(np.random.default_rng(3), head_dim=32, lengths=((70, 1),), kv_dtype="q8").kv.keys
    case.kv.keys.update(keys)
    assert_attends_alike(case, TOLERANCE["q8"])


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_cache_is_as_large_as_is_said_and_tells_its_format(kv_dtype: KvDtype, head_dim: int) -> None:
    kv = KvPages.allocate(range(3), 5, 2, head_dim, kv_dtype)
    total = sum(cache.nbytes for cache in (*kv.keys.values(), *kv.values.values()))
    assert total == 5 * page_bytes(3, 2, head_dim, kv_dtype)
    assert kv_dtype_of(kv.keys[1]) == kv_dtype


def test_bytes_of_a_vector() -> None:
    assert [vector_bytes(128, dtype) for dtype in ("f32", "f16", "q8", "q4")] == [512, 256, 136, 80]
    assert [vector_bytes(80, dtype) for dtype in ("q8", "q4")] == [86, 52]  # two groups and a half
    assert kv_dtype_of(np.zeros(3, np.int64)) is None


@given(arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 100)), elements=st.floats(-1e4, 1e4, width=32)))
def test_4_bits_are_off_by_half_a_step(heads: F32) -> None:
    """A step is a fifteenth of a group's range; scale and minimum are rounded to float16."""
    found = decode_kv(encode_kv(heads, np.dtype(np.uint8)), heads.shape[-1])
    for first in range(0, heads.shape[-1], KV_GROUP):
        group, other = (each[:, first : first + KV_GROUP].astype(np.float64) for each in (heads, found))
        step = (group.max(axis=1) - group.min(axis=1)) / 15
        rounding = 2.0**-11 * (np.abs(group.min(axis=1)) + 15 * step) + 16 * 2.0**-24
        assert (np.abs(group - other).max(axis=1) <= step / 2 + rounding).all()


def test_where_the_codes_of_4_bits_lie() -> None:
    """Value i of a run of 16 shares a byte with value i + 8; then come scale and minimum of each group."""
    head = np.arange(20, dtype=np.float32)[None] * np.float32(15 / 19)
    stored = encode_kv(head, np.dtype(np.uint8))[0]
    codes = np.rint(np.arange(20) * 15 / 19).astype(int)
    assert stored[:8].tolist() == [codes[i] | codes[i + 8] << 4 for i in range(8)]
    assert stored[8:16].tolist() == [*codes[16:20].tolist(), 0, 0, 0, 0]
    assert stored[16:].view(np.float16).tolist() == [1.0, 0.0]


@pytest.mark.parametrize(("kv_dtype", "unit"), [("f32", 4), ("f16", 2), ("q8", 4), ("q4", 4)])
def test_keys_of_a_page_lie_transposed(kv_dtype: KvDtype, unit: int) -> None:
    """The first unit of the codes of all tokens comes first; the factors of the groups follow all codes."""
    head_dim, element = 48, KvPages.allocate([0], 1, 1, 48, kv_dtype).keys[0].dtype
    keys = np.random.default_rng(9).normal(size=(32, head_dim)).astype(np.float32)
    vectors = encode_kv(keys, element).view(np.uint8)
    codes = code_bytes(head_dim, kv_dtype)
    expected = [vectors[:, first : first + unit] for first in range(0, codes, unit)]
    expected += [vectors[:, first : first + 2] for first in range(codes, vectors.shape[1], 2)]
    found = encode_keys(keys, element)
    assert found.view(np.uint8).reshape(-1).tolist() == np.concatenate([each.reshape(-1) for each in expected]).tolist()
    np.testing.assert_array_equal(decode_keys(found, head_dim), decode_kv(encode_kv(keys, element), head_dim))


@over_isas(("kv_dtype", "past"), KV_DTYPES, [0, 40])
def test_queries_with_nan_give_nan(kv_dtype: KvDtype, past: int) -> None:
    """A query with NaN or infinity gives NaN also where queries are rounded to integers."""
    case = attention_case(
        np.random.default_rng(10), heads=4, kv_heads=2, head_dim=32, kv_dtype=kv_dtype, lengths=((past, 1),)
    )
    heads = reference.project(case.spec, case.data, case.x, case.batch.positions)
    heads.queries[0, 1, 3], heads.queries[0, 2, 5] = np.nan, np.inf
    found = native.attend(case.spec, heads, case.kv.keys[0], case.kv.values[0], case.batch).reshape(4, 32)
    assert np.isnan(found).all(axis=1).tolist() == [False, True, True, False]


@each_isa
def test_a_cache_of_another_width_is_refused() -> None:
    case = attention_case(np.random.default_rng(4), head_dim=32, kv_dtype="q8")
    keys = case.kv.keys[0].view(np.uint8)
    with pytest.raises(KernelError, match="vectors of 34 elements; expected 20"):
        native.attention(case.spec, case.data, case.x, keys, keys, case.batch)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_spreading_keeps_products_and_undoes_itself(head_dim: int) -> None:
    queries, keys = np.random.default_rng(5).normal(size=(2, 7, head_dim)).astype(np.float32)
    np.testing.assert_allclose(hadamard_rotate(queries) @ hadamard_rotate(keys).T, queries @ keys.T, atol=1e-4)
    np.testing.assert_allclose(hadamard_rotate(hadamard_rotate(keys)), keys, atol=1e-5)


def test_what_is_large_in_one_dimension_costs_keys_less() -> None:
    """One dimension of all keys is ten times the others. The Hadamard transform halves the squared error."""
    keys = np.random.default_rng(6).normal(size=(100, 64)).astype(np.float32)
    keys[:, 5] += 10

    def error(values: F32) -> float:
        found = decode_kv(encode_kv(values, np.dtype(np.uint8)), 64)
        return float(np.square(found - values).sum())

    assert error(hadamard_rotate(keys)) < error(keys) / 2
