"""Norms over all heads, and clipped heads: one call with all heads, or halves that exchange sums."""

from dataclasses import replace

import numpy as np
import pytest

from tests.support.kernels.kernel_cases import AttentionCase, Random, attention_case, native, normal, reference
from tpi.errors import KernelError
from tpi.kernels import Kernels
from tpi.kernels.heads import apply_norms_and_rope, is_plain, needs_sums, squares, without_norms
from tpi.kernels.spec import F32, AttentionSpec, WholeNorms
from tpi.pack.layout import GROUP

HEADS, KV_HEADS, SIZE = 4, 2, 16


def case_of(random: Random, whole: bool, clip: float) -> AttentionCase:
    case = attention_case(random, lengths=((40, 3), (0, 20)), bias=True)
    norms = WholeNorms(
        normal(random, HEADS * SIZE), normal(random, KV_HEADS * SIZE), np.ones(KV_HEADS, np.bool_), HEADS * SIZE, 32
    )
    return replace(case, spec=replace(case.spec, clip=clip, whole=norms if whole else None))


def attend(kernels: Kernels, case: AttentionCase) -> F32:
    keys, values = case.kv.keys[0].copy(), case.kv.values[0].copy()
    out: F32 = kernels.attention(case.spec, case.data, case.x, keys, values, case.batch)
    return out


@pytest.mark.parametrize(("whole", "clip"), [(True, 0.0), (False, 0.5), (True, 1.0)])
def test_native_kernels_agree_with_the_reference(whole: bool, clip: float) -> None:
    case = case_of(np.random.default_rng(1), whole, clip)
    expected = attend(reference, case)
    np.testing.assert_allclose(attend(native, case), expected, atol=2e-5)
    assert np.abs(attend(reference, replace(case, spec=without_norms(case.spec))) - expected).max() > 0.1
    assert not is_plain(case.spec)


@pytest.mark.parametrize("kernels", [native, reference], ids=["native", "reference"])
def test_halves_that_exchange_sums_have_the_heads_of_the_whole(kernels: Kernels) -> None:
    """Both halves have all KV heads, and each counts one of them in the sum."""
    case = case_of(np.random.default_rng(2), True, 0.8)
    expected = reference.project(case.spec, case.data, case.x, case.batch.positions)
    norms = case.spec.whole
    assert norms is not None
    halves = [half_of(case.spec, norms, number) for number in range(2)]
    query = case.spec.query.units * case.spec.query.unit_bytes
    parts = [case.data[:query][: query // 2], case.data[:query][query // 2 :]]
    projected = [
        kernels.project(spec, np.concatenate([part, case.data[query:]]), case.x, case.batch.positions)
        for spec, part in zip(halves, parts, strict=True)
    ]
    sums = np.sum([squares(spec, heads) for spec, heads in zip(halves, projected, strict=True)], axis=0)
    assert sums.shape == (len(case.x), 2 * GROUP)
    done = [
        apply_norms_and_rope(spec, heads, case.batch.positions, sums)
        for spec, heads in zip(halves, projected, strict=True)
    ]
    np.testing.assert_allclose(np.concatenate([half.queries for half in done], axis=1), expected.queries, atol=2e-5)
    for half in done:
        np.testing.assert_allclose(half.keys, expected.keys, atol=2e-5)
        np.testing.assert_allclose(half.values, expected.values, atol=2e-5)


def half_of(spec: AttentionSpec, norms: WholeNorms, number: int) -> AttentionSpec:
    half = slice(number * HEADS // 2 * SIZE, (number + 1) * HEADS // 2 * SIZE)
    counted = np.arange(KV_HEADS) == number
    assert spec.q_bias is not None
    return replace(
        spec,
        query=replace(spec.query, units=spec.query.units // 2),
        heads=HEADS // 2,
        kv_index=spec.kv_index[number * 2 : number * 2 + 2].copy(),
        q_bias=spec.q_bias[half].copy(),
        whole=WholeNorms(norms.q[half].copy(), norms.k, counted, norms.q_values, norms.k_values),
    )


@pytest.mark.parametrize("kernels", [native, reference], ids=["native", "reference"])
def test_one_call_needs_all_heads(kernels: Kernels) -> None:
    case = case_of(np.random.default_rng(3), True, 0.0)
    norms = case.spec.whole
    assert norms is not None
    some = replace(case, spec=replace(case.spec, whole=replace(norms, q_values=2 * norms.q_values)))
    assert needs_sums(some.spec)
    with pytest.raises(KernelError, match="over the heads of all nodes"):
        attend(kernels, some)
