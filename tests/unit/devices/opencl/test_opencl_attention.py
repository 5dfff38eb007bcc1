"""Attention blocks on an OpenCL device against the reference, and what they leave in the cache."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest

from tests.support.devices.opencl_device import assert_close, fetched, hold, holding
from tests.support.kernels.kernel_cases import (
    PACKS,
    AttentionCase,
    assert_same_caches,
    attention_case,
    native,
    tolerance,
)
from tests.support.kernels.kernel_cases import reference as reference_kernels
from tests.support.kernels.pairwise import pairwise
from tpi.config import Format, Norm
from tpi.devices.opencl.device import OpenClDevice
from tpi.errors import DeviceError, KernelError
from tpi.kernels.kv import KV_DTYPES, KvDtype
from tpi.kernels.spec import F32, KvArray
from tpi.pack.layout import Layout

Lengths = tuple[tuple[int, int], ...]


def run(card: OpenClDevice, case: AttentionCase) -> tuple[F32, list[KvArray]]:
    """Return the block's output, and the caches after it."""
    with holding(card, case.data, case.kv.keys[0], case.kv.values[0]) as (data, keys, values):
        out = card.kernels.attention(case.spec, data, case.x, keys, values, case.batch)
        return out, [fetched(card, keys), fetched(card, values)]


def assert_attention_agrees(card: OpenClDevice, case: AttentionCase, limit: float) -> None:
    kv = deepcopy(case.kv)
    expected = reference_kernels.attention(case.spec, case.data, case.x, kv.keys[0], kv.values[0], case.batch)
    actual, caches = run(card, case)
    assert_close(actual, expected, limit)
    assert_same_caches(caches, (kv.keys[0], kv.values[0]), case.spec.head_dim, limit)


@pytest.mark.parametrize(("format", "layout"), PACKS)
@pytest.mark.parametrize("tokens", [1, 3, 16, 40])
def test_formats_and_layouts(card: OpenClDevice, format: Format, layout: Layout, tokens: int) -> None:
    case = attention_case(
        np.random.default_rng([1, tokens]), format=format, layout=layout, hidden=96, heads=3, head_dim=32,
        lengths=((33, tokens),),
    )  # fmt: skip
    assert_attention_agrees(card, case, tolerance(format))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("lengths", [((0, 1),), ((40, 1), (3, 1), (0, 4)), ((10, 45), (70, 2))])
def test_caches_of_several_sequences(card: OpenClDevice, kv_dtype: KvDtype, lengths: Lengths) -> None:
    case = attention_case(np.random.default_rng(2), kv_dtype=kv_dtype, lengths=lengths, heads=6, head_dim=32)
    assert_attention_agrees(card, case, {"f32": 5e-6, "f16": 2e-3, "q8": 2e-2, "q4": 6e-2}[kv_dtype])


@pytest.mark.parametrize(
    ("head_dim", "kv_dtype", "tokens"),
    pairwise([2, 10, 20, 32, 64, 80, 96, 128, 256], ["q8", "q4"], [1, 21]),
)
def test_head_sizes(card: OpenClDevice, head_dim: int, kv_dtype: KvDtype, tokens: int) -> None:
    case = attention_case(
        np.random.default_rng(3), head_dim=head_dim, heads=3, kv_heads=2, lengths=((33, tokens), (5, 1)),
        kv_dtype=kv_dtype, window=25,
    )  # fmt: skip
    assert_attention_agrees(card, case, {"q8": 2e-2, "q4": 6e-2}[kv_dtype])


@pytest.mark.parametrize(
    ("tokens", "window", "softcap", "others"),
    pairwise([1, 40], [0, 1, 17, 64], [0.0, 2.0], [((0, 2),), (), ((300, 1), (5, 1))]),
)
def test_windows_and_soft_caps(card: OpenClDevice, tokens: int, window: int, softcap: float, others: Lengths) -> None:
    case = attention_case(
        np.random.default_rng(4), window=window, softcap=softcap, lengths=((60, tokens), *others), head_dim=32
    )
    assert_attention_agrees(card, case, 1e-5)


@pytest.mark.parametrize(("norm", "rotary", "qk_norm"), pairwise(["rms", "layer"], [0, 8, 32], [True, False]))
def test_norms_biases_and_partial_rotation(card: OpenClDevice, norm: Norm, rotary: int, qk_norm: bool) -> None:
    case = attention_case(
        np.random.default_rng(5), norm=norm, rotary=rotary, qk_norm=qk_norm, bias=True, lengths=((300, 1), (5, 3)),
        head_dim=32,
    )  # fmt: skip
    assert_attention_agrees(card, case, 1e-5)


def test_a_long_context_in_chunks(card: OpenClDevice) -> None:
    case = attention_case(np.random.default_rng(6), lengths=((1500, 1), (600, 1), (2, 1)), kv_dtype="f16", head_dim=32)
    assert_attention_agrees(card, case, 1e-3)


def test_one_query_head_for_each_kv_head(card: OpenClDevice) -> None:
    case = attention_case(np.random.default_rng(7), heads=4, kv_heads=4, head_dim=32, lengths=((40, 1), (70, 1)))
    case = replace(case, spec=replace(case.spec, kv_index=np.arange(4, dtype=np.int32)))
    assert_attention_agrees(card, case, 5e-6)


def test_k_in_a_format_of_its_own(card: OpenClDevice) -> None:
    case = attention_case(np.random.default_rng(8), format="q4", kv_format="q8", head_dim=32, lengths=((5, 3),))
    assert_attention_agrees(card, case, 4e-3)


@pytest.mark.parametrize("kv_dtype", ["f32", "q8", "q4"])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_the_steps_have_the_bits_of_the_whole(card: OpenClDevice, kv_dtype: KvDtype, tokens: int) -> None:
    case = attention_case(
        np.random.default_rng(9), format="q4", heads=3, head_dim=32, bias=True, qk_norm=True, window=50, softcap=3.0,
        lengths=((33, tokens), (300, 1)), kv_dtype=kv_dtype,
    )  # fmt: skip
    expected, caches = run(card, case)
    kernels, spec = card.kernels, case.spec
    with holding(card, case.data, case.kv.keys[0], case.kv.values[0]) as (data, keys, values):
        prepared = kernels.prepare(spec, case.x)
        projected = kernels.project(spec, data, prepared, case.batch.positions)
        mixed = kernels.attend(spec, projected, keys, values, case.batch)
        np.testing.assert_array_equal(kernels.output(spec, data, mixed), expected)
        for mine, whole in zip((keys, values), caches, strict=True):
            assert fetched(card, mine).tobytes() == whole.tobytes()


def test_a_block_close_to_the_native_one(card: OpenClDevice) -> None:
    """A whole block of a common shape: both round to int8 in the same way."""
    case = attention_case(
        np.random.default_rng(10), format="q4", hidden=256, heads=8, kv_heads=2, head_dim=32, lengths=((100, 24),)
    )
    actual, _ = run(card, case)
    keys, values = case.kv.keys[0], case.kv.values[0]
    assert_close(actual, native.attention(case.spec, case.data, case.x, keys, values, case.batch), 4e-3)


def test_caches_that_are_elsewhere_or_do_not_fit_are_refused(card: OpenClDevice) -> None:
    case = attention_case(np.random.default_rng(11), head_dim=32, lengths=((3, 2),))
    kernels, spec, batch = card.kernels, case.spec, case.batch
    with holding(card, case.data, case.kv.keys[0], case.kv.values[0]) as (data, keys, values):
        with pytest.raises(DeviceError, match="the caches must lie in the memory of opencl:0"):
            kernels.attention(spec, data, case.x, case.kv.keys[0], values, batch)
        wrong_batches = [
            replace(batch, tables=batch.tables + np.int32(100)),
            replace(batch, sequence=batch.sequence + np.int32(1)),
            replace(batch, positions=batch.positions + np.int32(3200)),
            replace(batch, positions=batch.positions.astype(np.int64)),
            replace(batch, sequence=batch.sequence[:1]),
        ]
        for wrong in wrong_batches:
            with pytest.raises(KernelError):
                kernels.attention(spec, data, case.x, keys, values, wrong)
        with pytest.raises(KernelError, match="KV heads"):
            kernels.attention(spec, data, case.x, keys[:, :1], values, batch)
        with pytest.raises(KernelError, match="not a vector of 32"):
            kernels.attention(spec, data, case.x, keys.view(np.float16), values, batch)
        with pytest.raises(KernelError, match="same shape and dtype"):
            kernels.attention(spec, data, case.x, keys[1:], values, batch)
        with pytest.raises(KernelError, match="positions"):
            kernels.project(spec, data, case.x, batch.positions[:1])


def test_no_tokens_and_no_heads(card: OpenClDevice) -> None:
    case = attention_case(np.random.default_rng(12), head_dim=32)
    none = replace(case.batch, positions=case.batch.positions[:0], sequence=case.batch.sequence[:0])
    query, kv = replace(case.spec.query, units=0), replace(case.spec.kv, units=0)
    empty = replace(case.spec, query=query, kv=kv, heads=0, kv_heads=0, kv_index=case.spec.kv_index[:0])
    with holding(card, case.data, case.kv.keys[0], case.kv.values[0]) as (data, keys, values):
        out = card.kernels.attention(case.spec, data, case.x[:0], keys, values, none)
        assert out.shape == (0, 64)
    nothing = hold(card, case.kv.keys[0][:, :0])
    out = card.kernels.attention(empty, case.data[:0], case.x, nothing, nothing, case.batch)
    np.testing.assert_array_equal(out, np.zeros_like(case.x))
