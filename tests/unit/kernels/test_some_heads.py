"""Attention with some of the heads and then with the others has the bits of attention with all heads."""

from dataclasses import replace

import numpy as np
import pytest

from tests.support.kernels.kernel_cases import attention_case, native
from tpi.kernels.kv import KV_DTYPES, KvDtype
from tpi.partition import Range
from worker.pipelines.segments import concatenate_heads, some_heads

HEADS, KV_HEADS = 7, 3
SHARED = np.array([0, 0, 1, 1, 1, 2, 2], np.int32)  # a group that is cut, as on uneven nodes


@pytest.mark.parametrize("kept", [1, 2])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_attention_in_parts_has_the_bits_of_all_heads_at_once(kv_dtype: KvDtype, kept: int) -> None:
    case = attention_case(
        np.random.default_rng(kept), heads=HEADS, kv_heads=KV_HEADS, kv_dtype=kv_dtype, bias=True, qk_norm=True,
        lengths=((70, 1), (5, 1), (0, 40)),
    )  # fmt: skip
    sinks = np.linspace(-1, 1, HEADS, dtype=np.float32)
    spec, caches = replace(case.spec, kv_index=SHARED, sinks=sinks), (case.kv.keys[0], case.kv.values[0])
    heads = native.project(spec, case.data, case.x, case.batch.positions)
    keys, values = (cache.copy() for cache in caches)
    whole = native.attend(spec, heads, keys, values, case.batch)
    mixed = []
    for units in (Range(0, kept), Range(kept, KV_HEADS)):
        part = some_heads(spec, units)
        assert part is not None
        own = slice(units.first, units.last)
        own_keys, own_values = (np.ascontiguousarray(cache[:, own]) for cache in caches)
        mixed.append(native.attend(part.spec, part.of(heads), own_keys, own_values, case.batch))
        np.testing.assert_array_equal(own_keys, keys[:, own])
        np.testing.assert_array_equal(own_values, values[:, own])
        assert part.nbytes(heads) == sum(each.nbytes for each in vars(part.of(heads)).values() if each is not None)
    np.testing.assert_array_equal(concatenate_heads(*mixed), whole)


def test_none_and_all_of_the_heads() -> None:
    spec = attention_case(np.random.default_rng(0), heads=4, kv_heads=2).spec
    assert some_heads(spec, Range(0, 0)) is None
    every = some_heads(spec, Range(0, 2))
    assert every is not None
    assert every.spec is spec
