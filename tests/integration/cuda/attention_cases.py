"""Attention on the card against the reference: heads, pages in every format, windows, several sequences, chains."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.devices.held import fetched, held
from tests.support.kernels.kernel_cases import (
    AttentionCase,
    assert_same_caches,
    attention_case,
    ffn_case,
    norm_spec,
    normal,
    reference,
)
from tpi.config import Format, Norm
from tpi.devices.cuda.attention import blocks_of
from tpi.devices.cuda.device import CudaDevice
from tpi.errors import DeviceError, KernelError
from tpi.kernels.kv import KV_DTYPES, KvDtype
from tpi.kernels.spec import F32, ChainBlock, Residual
from tpi.pack.layout import Layout

TOLERANCE: dict[Format, float] = {"f32": 1e-5, "bf16": 1e-5, "q8": 1e-4, "f16": 1e-5}  # 4e-3 for others
CACHE: dict[KvDtype, float] = {"f32": 0, "f16": 2e-3, "q8": 2e-2, "q4": 6e-2}


def assert_close(actual: F32, expected: F32, tolerance: float) -> None:
    """Check that two arrays differ by at most `tolerance` of the largest value."""
    assert actual.shape == expected.shape
    assert np.isfinite(actual).all()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * max(float(np.abs(expected).max()), 1e-3))


def run(device: CudaDevice, case: AttentionCase) -> tuple[F32, Any, Any]:
    """Return the output of the block, and the caches after it."""
    with held(device, case.data, case.kv.keys[0], case.kv.values[0]) as (data, keys, values):
        out = device.kernels.attention(case.spec, data, case.x, keys, values, case.batch)
        return out, fetched(device, keys), fetched(device, values)


def assert_attention_agrees(device: CudaDevice, case: AttentionCase, tolerance: float) -> None:
    """Compare the output, and the rows appended to the caches, with those of the reference."""
    actual, keys, values = run(device, case)
    kv = deepcopy(case.kv)
    assert_close(
        actual, reference.attention(case.spec, case.data, case.x, kv.keys[0], kv.values[0], case.batch), tolerance
    )
    assert_same_caches((keys, values), (kv.keys[0], kv.values[0]), case.spec.head_dim, tolerance)
    assert (kv.keys[0] != case.kv.keys[0]).any()


@pytest.mark.parametrize(
    ("format", "layout"),
    [("f32", "record"), ("bf16", "record"), ("q8", "record"), ("q8", "tiled"), ("q4", "tiled"), ("iq4", "tiled")],
)
def test_formats_and_layouts(device: CudaDevice, format: Format, layout: Layout) -> None:
    """Three heads of 8: a tiled unit has four, so the last is padding.

    One format of each kind: `product_cases.py` multiplies by the weights of all formats.
    """
    case = attention_case(
        np.random.default_rng(1), format=format, layout=layout, heads=3, head_dim=8, lengths=((5, 1),)
    )
    assert_attention_agrees(device, case, TOLERANCE.get(format, 4e-3))


@pytest.mark.parametrize(
    ("format", "kv_dtype", "window", "softcap"),
    [("f32", "f32", 0, 0.0), ("q4", "f16", 20, 0.0), ("bf16", "q8", 1, 2.0), ("f32", "q4", 70, 2.0)],
)
def test_a_prompt_attends_in_blocks(
    device: CudaDevice, format: Format, kv_dtype: KvDtype, window: int, softcap: float
) -> None:
    """Attend with two sequences that have earlier pages: one has more than a block of tokens, the other one block."""
    case = attention_case(
        np.random.default_rng(11), format=format, kv_dtype=kv_dtype, window=window, softcap=softcap, heads=2,
        kv_heads=1, head_dim=16, lengths=((60, 18), (3, 6)),
    )  # fmt: skip
    assert_attention_agrees(device, case, max(TOLERANCE.get(format, 4e-3), CACHE[kv_dtype]))


@given(st.lists(st.integers(0, 2), max_size=70))
def test_blocks_cover_all_tokens_and_one_sequence_each(sequence: list[int]) -> None:
    blocks = blocks_of(np.array(sequence, np.int32))
    covered = [token for first, count in blocks.tolist() for token in range(first, first + count)]
    assert covered == list(range(len(sequence)))
    for first, count in blocks.tolist():
        assert 1 <= count <= 16
        assert len(set(sequence[first : first + count])) == 1


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("lengths", [((40, 1), (3, 1)), ((31, 2), (0, 1))])
def test_caches_of_several_sequences(
    device: CudaDevice, kv_dtype: KvDtype, lengths: tuple[tuple[int, int], ...]
) -> None:
    case = attention_case(np.random.default_rng(2), kv_dtype=kv_dtype, lengths=lengths, heads=2, head_dim=40)
    assert_attention_agrees(device, case, max(1e-5, CACHE[kv_dtype]))


@pytest.mark.parametrize("head_dim", [10, 32, 64, 80, 96, 128])
def test_head_sizes_in_4_bits(device: CudaDevice, head_dim: int) -> None:
    case = attention_case(
        np.random.default_rng(12), kv_dtype="q4", lengths=((33, 1),), heads=2, kv_heads=1, head_dim=head_dim
    )
    assert_attention_agrees(device, case, CACHE["q4"])


@pytest.mark.parametrize("window", [0, 1, 40])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_windows_and_soft_caps(device: CudaDevice, window: int, softcap: float) -> None:
    case = attention_case(
        np.random.default_rng(3), hidden=32, window=window, softcap=softcap, lengths=((62, 3),), heads=2, kv_heads=1
    )
    assert_attention_agrees(device, case, 1e-5)


@pytest.mark.parametrize(("norm", "rotary", "qk_norm"), [("rms", 0, True), ("layer", 8, False), ("rms", 16, True)])
def test_norms_biases_and_partial_rotation(device: CudaDevice, norm: Norm, rotary: int, qk_norm: bool) -> None:
    case = attention_case(
        np.random.default_rng(4),
        norm=norm,
        rotary=rotary,
        qk_norm=qk_norm,
        bias=True,
        lengths=((300, 1), (5, 1)),
        heads=2,
        kv_heads=1,
    )
    assert_attention_agrees(device, case, 1e-5)


def test_a_long_past_is_shared_out(device: CudaDevice) -> None:
    """700 tokens in 22 pages of one head, and a short sequence that leaves the later parts of the work empty."""
    case = attention_case(
        np.random.default_rng(5), lengths=((700, 1), (3, 1)), kv_dtype="f16", heads=1, kv_heads=1, window=650
    )
    assert_attention_agrees(device, case, 1e-3)


def test_k_may_have_a_format_of_its_own(device: CudaDevice) -> None:
    case = attention_case(
        np.random.default_rng(6), format="q4", kv_format="q8", head_dim=16, heads=2, lengths=((3, 1),)
    )
    assert_attention_agrees(device, case, 4e-3)


@pytest.mark.parametrize(("format", "layout"), [("q4", "tiled"), ("bf16", "record")])
def test_steps_have_the_bits_of_the_one_call(device: CudaDevice, format: Format, layout: Layout) -> None:
    case = attention_case(
        np.random.default_rng(7), format=format, layout=layout, head_dim=16, bias=True, qk_norm=True,
        lengths=((33, 2),), heads=2, kv_heads=1, kv_dtype="q8",
    )  # fmt: skip
    whole = run(device, case)
    kernels = device.kernels
    with held(device, case.data, case.kv.keys[0], case.kv.values[0]) as (data, keys, values):
        prepared = kernels.prepare(case.spec, case.x)
        heads = kernels.project(case.spec, data, prepared, case.batch.positions)
        mixed = kernels.attend(case.spec, heads, keys, values, case.batch)
        found = kernels.output(case.spec, data, mixed), fetched(device, keys), fetched(device, values)
    for one, other in zip(found, whole, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_chain_is_its_blocks_one_by_one(device: CudaDevice) -> None:
    random = np.random.default_rng(8)
    first = attention_case(random, format="f32", lengths=((3, 2),), heads=2, kv_heads=1)
    second = ffn_case(random, format="f32", tokens=2, units=1)
    residuals = Residual(bias=normal(random, 64)), Residual(norm=norm_spec(random, "rms", 64))
    keys, values = first.kv.keys[0], first.kv.values[0]
    host = [
        ChainBlock(first.spec, first.data, residuals[0], keys.copy(), values.copy()),
        ChainBlock(second.spec, second.data, residuals[1]),
    ]
    expected = reference.open_chain(host).run(first.x, first.batch)
    with held(device, first.data, second.data, keys, values) as (one, other, own_keys, own_values):
        there = [replace(host[0], data=one, keys=own_keys, values=own_values), replace(host[1], data=other)]
        ended = np.zeros(2, np.int64)
        assert_close(device.kernels.open_chain(there).run(first.x, first.batch, ended), expected, 1e-5)
        assert 0 < ended[0] <= ended[1]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_chain_repeats_short_steps_for_other_tokens(device: CudaDevice, kv_dtype: KvDtype) -> None:
    """Steps of one shape are recorded at the second and replayed from the third on; another shape comes between."""
    random = np.random.default_rng(11)
    first = attention_case(random, format="f32", lengths=((3, 1), (60, 1)), heads=2, kv_heads=1, kv_dtype=kv_dtype)
    second = ffn_case(random, format="f32", tokens=2, units=1)
    keys, values, hidden = first.kv.keys[0], first.kv.values[0], first.x.shape[1]
    residuals = Residual(bias=normal(random, hidden)), Residual(scale=0.5)
    host = [
        ChainBlock(first.spec, first.data, residuals[0], keys.copy(), values.copy()),
        ChainBlock(second.spec, second.data, residuals[1]),
    ]
    expected = reference.open_chain(host)
    with held(device, first.data, second.data, keys, values) as (one, other, own_keys, own_values):
        there = [replace(host[0], data=one, keys=own_keys, values=own_values), replace(host[1], data=other)]
        chain = device.kernels.open_chain(there)
        for step in range(6):
            tokens = slice(0, 1) if step == 3 else slice(0, 2)
            x = normal(random, 2, hidden)[tokens]
            batch = first.batch.cut(tokens)
            if step < 3:
                batch = replace(batch, positions=batch.positions - np.int32(2 - step))
            assert_close(chain.run(x, batch), expected.run(x, batch), 1e-5 if kv_dtype in ("f32", "f16") else 2e-2)


def test_what_does_not_fit_is_refused(device: CudaDevice) -> None:
    case = attention_case(np.random.default_rng(9), lengths=((3, 2),))
    kernels, batch = device.kernels, case.batch
    with held(device, case.data, case.kv.keys[0], case.kv.values[0]) as (data, keys, values):
        good = kernels.project(case.spec, data, case.x, batch.positions)
        for heads in (
            replace(good, queries=good.queries[:1]),
            replace(good, values=good.values.astype(np.float64)),
            replace(good, keys=np.asfortranarray(good.keys)),
        ):
            with pytest.raises(KernelError, match="must be contiguous float32"):
                kernels.attend(case.spec, heads, keys, values, batch)
        for wrong, what in (
            (replace(batch, tables=batch.tables + np.int32(100)), "a page is outside"),
            (replace(batch, sequence=batch.sequence + np.int32(1)), "a sequence is outside"),
            (replace(batch, positions=batch.positions + np.int32(64)), "a position is outside"),
            (replace(batch, positions=batch.positions - np.int32(9)), "a position is outside"),
            (replace(batch, positions=batch.positions.astype(np.int64)), "positions must be contiguous int32"),
        ):
            with pytest.raises(KernelError, match=what):
                kernels.attend(case.spec, good, keys, values, wrong)
        with pytest.raises(KernelError, match="positions must be"):
            kernels.project(case.spec, data, case.x, batch.positions[:1])
        with pytest.raises(KernelError, match="heads must be"):
            kernels.output(case.spec, data, case.x[:, :-1].copy())
        halves = values.reshape(-1).view(np.float16)[: values.size].reshape(values.shape)
        with pytest.raises(KernelError, match="same shape and dtype"):
            kernels.attend(case.spec, good, keys, halves, batch)
        with pytest.raises(KernelError, match="not a vector of"):
            kernels.attend(case.spec, good, keys.view(np.uint8), values.view(np.uint8), batch)
        with pytest.raises(DeviceError, match="the caches must lie in the memory of cuda"):
            kernels.attend(case.spec, good, case.kv.keys[0], values, batch)


def test_no_tokens_and_no_heads(device: CudaDevice) -> None:
    case = attention_case(np.random.default_rng(10))
    none = replace(case.batch, positions=case.batch.positions[:0], sequence=case.batch.sequence[:0])
    with held(device, case.data, case.kv.keys[0], case.kv.values[0]) as (data, keys, values):
        assert device.kernels.attention(case.spec, data, case.x[:0], keys, values, none).shape == (0, 64)
        query, kv = replace(case.spec.query, units=0), replace(case.spec.kv, units=0)
        empty = replace(case.spec, query=query, kv=kv, heads=0, kv_heads=0, kv_index=case.spec.kv_index[:0])
        found = device.kernels.attention(empty, data[:0], case.x, keys[:, :0], values[:, :0], case.batch)
        np.testing.assert_array_equal(found, np.zeros_like(case.x))
