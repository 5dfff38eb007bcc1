"""A block in steps (prepare once, project, attend, output) has the bits of one call."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest

from tests.support.kernels.kernel_cases import (
    PACKS,
    AttentionCase,
    FfnCase,
    attention_case,
    ffn_case,
    native,
    reference,
)
from tests.support.kernels.pairwise import pairwise
from tpi.config import Format
from tpi.errors import KernelError
from tpi.kernels import Kernels
from tpi.kernels.kv import KvDtype
from tpi.kernels.spec import F32, Input, Projected
from tpi.pack.layout import RECORDS, Layout

TOKENS = [1, 3, 16, 17, 40]
BOTH = [native, reference]
KERNELS = [(native, 1), (native, 3), (reference, 1)]  # with threads


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = native.threads()
    yield
    native.set_threads(before)


def with_threads(chosen: tuple[Kernels, int]) -> Kernels:
    kernels, threads = chosen
    kernels.set_threads(threads)
    return kernels


def whole(kernels: Kernels, case: AttentionCase, x: Input) -> tuple[F32, list[bytes]]:
    """Return the output of one call, and the bytes of the caches after it."""
    kv = deepcopy(case.kv)
    out = kernels.attention(case.spec, case.data, x, kv.keys[0], kv.values[0], case.batch)
    return out, [kv.keys[0].tobytes(), kv.values[0].tobytes()]


def in_steps(kernels: Kernels, case: AttentionCase, x: Input) -> tuple[F32, list[bytes]]:
    """Return the same results, computed by `project`, `attend` and `output`."""
    kv = deepcopy(case.kv)
    projected = kernels.project(case.spec, case.data, x, case.batch.positions)
    mixed = kernels.attend(case.spec, projected, kv.keys[0], kv.values[0], case.batch)
    out = kernels.output(case.spec, case.data, mixed)
    return out, [kv.keys[0].tobytes(), kv.values[0].tobytes()]


def assert_same_bits(one: tuple[F32, list[bytes]], other: tuple[F32, list[bytes]]) -> None:
    assert one[1] == other[1]
    assert np.abs(one[0]).max() > 0
    np.testing.assert_array_equal(one[0], other[0])


@pytest.mark.parametrize(("chosen", "packed", "tokens"), pairwise(KERNELS, PACKS, TOKENS))
def test_attention_in_steps(chosen: tuple[Kernels, int], packed: tuple[Format, Layout], tokens: int) -> None:
    kernels = with_threads(chosen)
    format, layout = packed
    case = attention_case(
        np.random.default_rng([1, tokens]), format=format, layout=layout, hidden=96, heads=3, head_dim=20, bias=True,
        qk_norm=True, norm="layer", lengths=((33, tokens),), kv_dtype="f16",
    )  # fmt: skip
    expected = whole(kernels, case, case.x)
    assert_same_bits(in_steps(kernels, case, case.x), expected)
    prepared = kernels.prepare(case.spec, case.x)
    assert_same_bits(whole(kernels, case, prepared), expected)
    assert_same_bits(in_steps(kernels, case, prepared), expected)


@pytest.mark.parametrize(
    ("chosen", "kv_dtype", "lengths"),
    pairwise(KERNELS, ["f32", "f16", "q8"], [((40, 1), (3, 1), (300, 1)), ((10, 45), (70, 2)), ((0, 1),)]),
)
def test_several_sequences_in_steps(
    chosen: tuple[Kernels, int], kv_dtype: KvDtype, lengths: tuple[tuple[int, int], ...]
) -> None:
    """In one call, the task that attends also appends its new token. In steps, all tokens are appended first."""
    kernels = with_threads(chosen)
    case = attention_case(
        np.random.default_rng(2), format="q4", head_dim=32, lengths=lengths, kv_dtype=kv_dtype, window=50, softcap=3.0
    )
    assert_same_bits(in_steps(kernels, case, case.x), whole(kernels, case, case.x))


def tiles(case: FfnCase, size: int) -> list[FfnCase]:
    """Return the units of a block, `size` to a tile."""
    run, found = case.spec.neuron, []
    for first in range(0, run.units, size):
        part = replace(run, units=min(size, run.units - first))
        data = case.data[first * run.unit_bytes : (first + part.units) * run.unit_bytes]
        found.append(FfnCase(replace(case.spec, neuron=part), data, case.x))
    return found


@pytest.mark.parametrize(("chosen", "packed", "tokens"), pairwise(KERNELS, PACKS, TOKENS))
def test_a_feed_forward_block_is_prepared_once_for_its_tiles(
    chosen: tuple[Kernels, int], packed: tuple[Format, Layout], tokens: int
) -> None:
    kernels = with_threads(chosen)
    format, layout = packed
    random = np.random.default_rng([3, tokens])
    case = ffn_case(random, format=format, layout=layout, hidden=96, units=5, tokens=tokens)
    parts = tiles(case, 2)
    alone = [kernels.ffn(part.spec, part.data, part.x) for part in parts]
    prepared = kernels.prepare(case.spec, case.x)
    expected = kernels.ffn(case.spec, case.data, case.x)
    np.testing.assert_array_equal(kernels.ffn(case.spec, case.data, prepared), expected)
    for part, made in zip(parts, alone, strict=True):
        np.testing.assert_array_equal(kernels.ffn(part.spec, part.data, prepared), made)
    np.testing.assert_allclose(sum(alone), expected, atol=2e-2)


@pytest.mark.parametrize(("chosen", "format", "tokens"), pairwise(KERNELS, list(RECORDS), [1, 16, 40]))
def test_active_neurons_of_what_is_prepared(chosen: tuple[Kernels, int], format: Format, tokens: int) -> None:
    """More tokens than a short step has are computed in several calls."""
    kernels = with_threads(chosen)
    random = np.random.default_rng([4, tokens])
    case = ffn_case(random, format=format, layout="record", activation="relu", tokens=tokens)
    active = np.sort(random.permutation(96)[:40]).astype(np.int32)
    np.testing.assert_array_equal(
        kernels.ffn(case.spec, case.data, kernels.prepare(case.spec, case.x), active),
        kernels.ffn(case.spec, case.data, case.x, active),
    )


@pytest.mark.parametrize("kernels", BOTH, ids=["native", "reference"])
def test_what_was_prepared_is_the_norm_and_goes_to_other_kernels(kernels: Kernels) -> None:
    """A router reads the norm, and kernels of another device only round it."""
    case = ffn_case(np.random.default_rng(5), format="q4", hidden=96, norm="layer", tokens=3)
    prepared = kernels.prepare(case.spec, case.x)
    assert prepared.shape == (3, 96)
    np.testing.assert_array_equal(prepared.values(), kernels.norm(case.spec.norm, case.x))
    other = reference if kernels is native else native
    there = other.prepare(case.spec, prepared)
    np.testing.assert_array_equal(there.values(), prepared.values())
    np.testing.assert_allclose(
        other.ffn(case.spec, case.data, there), kernels.ffn(case.spec, case.data, case.x), atol=2e-2
    )


@pytest.mark.parametrize("kernels", BOTH, ids=["native", "reference"])
def test_an_input_without_a_norm_is_prepared_as_it_is(kernels: Kernels) -> None:
    case = ffn_case(np.random.default_rng(5), format="q4", hidden=96, norm="none", tokens=20)
    prepared = kernels.prepare(case.spec, case.x)
    np.testing.assert_array_equal(prepared.values(), case.x)
    np.testing.assert_array_equal(
        kernels.ffn(case.spec, case.data, prepared), kernels.ffn(case.spec, case.data, case.x)
    )


def test_memory_is_used_again_whatever_it_held() -> None:
    random, kept = np.random.default_rng(6), None
    for format, tokens in (("q8", 40), ("f32", 1), ("q4", 17), ("q4", 3), ("q8", 70)):
        case = ffn_case(random, format=format, layout="record", hidden=64, tokens=tokens)  # type: ignore[arg-type]
        into = native.prepare(case.spec, case.x, kept)
        assert kept is None or into is kept
        kept = into
        np.testing.assert_array_equal(native.ffn(case.spec, case.data, kept), native.ffn(case.spec, case.data, case.x))


def test_what_was_prepared_for_other_weights_is_refused() -> None:
    random = np.random.default_rng(7)
    plain, codes = ffn_case(random, format="f32"), ffn_case(random, format="q8")
    with pytest.raises(KernelError, match="another format"):
        native.ffn(codes.spec, codes.data, native.prepare(plain.spec, plain.x))
    native.ffn(plain.spec, plain.data, native.prepare(codes.spec, codes.x))  # has floats too
    wide = ffn_case(random, format="f32", hidden=96)
    with pytest.raises(KernelError, match="hidden size 96"):
        native.ffn(plain.spec, plain.data, native.prepare(wide.spec, wide.x))
    with pytest.raises(KernelError, match="other kernels"):
        native.ffn(plain.spec, plain.data, reference.prepare(plain.spec, plain.x))
    with pytest.raises(KernelError, match="hidden size 0"):
        native.ffn(plain.spec, plain.data, type(native.prepare(plain.spec, plain.x))())


def test_heads_that_do_not_fit_are_refused() -> None:
    case = attention_case(np.random.default_rng(8), lengths=((3, 2),))
    good = native.project(case.spec, case.data, case.x, case.batch.positions)
    keys, values = case.kv.keys[0], case.kv.values[0]
    wrong = [
        replace(good, queries=good.queries[:1]),
        replace(good, keys=good.queries),
        replace(good, values=good.values.astype(np.float64)),
        replace(good, keys=np.asfortranarray(good.keys)),
    ]
    for each in wrong:
        with pytest.raises(KernelError):
            native.attend(case.spec, each, keys, values, case.batch)
    with pytest.raises(KernelError, match="outside the"):
        native.attend(case.spec, good, keys, values, replace(case.batch, tables=case.batch.tables + 100))
    with pytest.raises(KernelError, match="positions"):
        native.project(case.spec, case.data, case.x, case.batch.positions[:1])
    with pytest.raises(KernelError, match="the heads"):
        native.output(case.spec, case.data, case.x[:, :-1].copy())


def test_no_tokens_and_no_heads_in_steps() -> None:
    case = attention_case(np.random.default_rng(9))
    none = replace(case.batch, positions=case.batch.positions[:0], sequence=case.batch.sequence[:0])
    projected = native.project(case.spec, case.data, case.x[:0], none.positions)
    mixed = native.attend(case.spec, projected, case.kv.keys[0], case.kv.values[0], none)
    assert native.output(case.spec, case.data, mixed).shape == (0, 64)
    query, kv = replace(case.spec.query, units=0), replace(case.spec.kv, units=0)
    empty = replace(case.spec, query=query, kv=kv, heads=0, kv_heads=0, kv_index=case.spec.kv_index[:0])
    caches = [cache[:, :0].copy() for cache in (case.kv.keys[0], case.kv.values[0])]
    heads = native.project(empty, case.data[:0], case.x, case.batch.positions)
    assert isinstance(heads, Projected)
    out = native.output(empty, case.data[:0], native.attend(empty, heads, caches[0], caches[1], case.batch))
    np.testing.assert_array_equal(out, np.zeros_like(case.x))
