"""Every native kernel against its numpy reference, over shapes, formats and the instruction sets of this machine."""

from copy import deepcopy

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.kernels.isas import ISAS, each_isa, over_isas
from tests.support.kernels.kernel_cases import (
    FORMATS,
    PACKS,
    AttentionCase,
    FfnCase,
    assert_same_caches,
    attention_case,
    ffn_case,
    native,
    norm_spec,
    normal,
    pack,
    reference,
    tolerance,
)
from tpi.config import Activation, Format
from tpi.kernels.kv import KvDtype
from tpi.kernels.normspec import NormKind
from tpi.kernels.spec import F32, NormSpec
from tpi.pack.layout import RECORDS, Layout, Part, is_quantised

pytestmark = pytest.mark.usefixtures("isa")
QUANTISED = [format for format in FORMATS if is_quantised(format)]
RECORD_TOLERANCE = 1.5e-2  # 4-bit columns in records: the inner activations are rounded to int8 over 8 neurons


def assert_close(actual: F32, expected: F32, limit: float) -> None:
    """Check that two arrays differ by at most `limit` of the largest value."""
    assert actual.shape == expected.shape
    assert np.isfinite(actual).all()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=limit * max(float(np.abs(expected).max()), 1e-3))


def assert_attention_agrees(case: AttentionCase, limit: float) -> None:
    """Compare the native output, and the rows appended to the cache, with those of the reference."""
    expected_kv = deepcopy(case.kv)
    expected = reference.attention(case.spec, case.data, case.x, expected_kv.keys[0], expected_kv.values[0], case.batch)
    actual = native.attention(case.spec, case.data, case.x, case.kv.keys[0], case.kv.values[0], case.batch)
    assert_close(actual, expected, limit)
    mine, theirs = ((kv.keys[0], kv.values[0]) for kv in (case.kv, expected_kv))
    assert_same_caches(mine, theirs, case.spec.head_dim, limit)


def assert_ffn_agrees(case: FfnCase, limit: float, active: npt.NDArray[np.int32] | None = None) -> None:
    """Compare the native output with the reference's."""
    expected = reference.ffn(case.spec, case.data, case.x, active)
    assert_close(native.ffn(case.spec, case.data, case.x, active), expected, limit)


@over_isas(("format", "tokens"), FORMATS, [1, 2, 3, 5, 16, 17, 70])
def test_ffn(format: Format, tokens: int) -> None:
    random = np.random.default_rng([1, tokens])
    case = ffn_case(random, format=format, hidden=96, units=int(random.integers(1, 7)), tokens=tokens)
    assert_ffn_agrees(case, tolerance(format))


@over_isas(
    ("layout", "tokens", "formats"), ["record", "tiled"], [1, 6, 33], [("q4", "q8"), ("q8", "q4s"), ("q4s", "q4")]
)
def test_ffn_of_mixed_formats(layout: Layout, tokens: int, formats: tuple[Format, Format]) -> None:
    format, down = formats
    case = ffn_case(np.random.default_rng(2), format=format, down=down, layout=layout, hidden=160, tokens=tokens)
    assert_ffn_agrees(case, RECORD_TOLERANCE if layout == "record" else 4e-3)


@over_isas(
    ("activation", "gated", "format", "tokens"),
    ["silu", "gelu", "gelu_tanh", "relu"],
    [True, False],
    ["f32", "q4"],
    [1, 20],
)
def test_ffn_activations_and_biases(activation: Activation, gated: bool, format: Format, tokens: int) -> None:
    random = np.random.default_rng(3)
    case = ffn_case(random, format=format, activation=activation, gated=gated, norm="layer", bias=True, tokens=tokens)
    assert_ffn_agrees(case, tolerance(format))


@over_isas(("hidden", "format", "tokens"), [1, 3, 19, 67, 100], ["f32", "bf16"], [1, 5, 19])
def test_ffn_hidden_size_is_not_a_multiple_of_the_vector_width(hidden: int, format: Format, tokens: int) -> None:
    assert_ffn_agrees(ffn_case(np.random.default_rng(4), format=format, hidden=hidden, tokens=tokens), 2e-5)


@over_isas(("format", "tokens", "width"), RECORDS, [1, 16, 17, 40], [1, 5, 12])
def test_ffn_whose_neurons_come_not_in_eights(format: Format, tokens: int, width: int) -> None:
    for gated, units in ((True, 1), (False, 3), (True, 3)):
        case = ffn_case(
            np.random.default_rng([7, width]), format=format, layout="record", width=width, units=units, bias=True,
            gated=gated, tokens=tokens,
        )  # fmt: skip
        assert_ffn_agrees(case, RECORD_TOLERANCE if format in ("q4", "q4s") else 5e-4)


@over_isas(("format", "tokens", "count"), RECORDS, [1, 4, 18], [0, 1, 9, 95])
def test_ffn_of_active_neurons(format: Format, tokens: int, count: int) -> None:
    random = np.random.default_rng([5, count])
    case = ffn_case(random, format=format, layout="record", activation="relu", tokens=tokens)
    active = random.permutation(96)[:count].astype(np.int32)
    assert_ffn_agrees(case, RECORD_TOLERANCE if format in ("q4", "q4s") else tolerance(format), active)


@over_isas(
    ("format", "kv_dtype", "lengths"),
    FORMATS,
    ["f32", "f16", "q8"],
    [((0, 1),), ((40, 1), (3, 1), (0, 4)), ((10, 45), (70, 2))],
)
def test_attention(format: Format, kv_dtype: KvDtype, lengths: tuple[tuple[int, int], ...]) -> None:
    random = np.random.default_rng(6)
    case = attention_case(random, format=format, kv_dtype=kv_dtype, lengths=lengths, hidden=128, heads=6, head_dim=32)
    assert_attention_agrees(case, max(tolerance(format), {"f32": 0, "f16": 2e-3, "q8": 2e-2}[kv_dtype]))


@over_isas(("head_dim", "format", "tokens"), [2, 6, 20, 40, 64, 80, 128], ["f32", "q4"], [1, 21])
def test_attention_head_sizes(head_dim: int, format: Format, tokens: int) -> None:
    case = attention_case(
        np.random.default_rng(7), format=format, head_dim=head_dim, heads=3, kv_heads=3, lengths=((33, tokens),)
    )
    assert_attention_agrees(case, tolerance(format))


@over_isas(
    ("tokens", "window", "softcap", "others"), [1, 40], [0, 1, 17, 64], [0.0, 2.0], [((0, 2),), (), ((300, 1), (5, 1))]
)
def test_attention_windows_and_soft_caps(
    tokens: int, window: int, softcap: float, others: tuple[tuple[int, int], ...]
) -> None:
    lengths = ((60, tokens), *others)
    case = attention_case(np.random.default_rng(8), window=window, softcap=softcap, lengths=lengths)
    assert_attention_agrees(case, 1e-5)


@over_isas(
    ("norm", "rotary", "qk_norm", "lengths"),
    ["rms", "layer", "none"],
    [0, 8, 16],
    [True, False],
    [((5, 3),), ((300, 1), (5, 1))],
)
def test_attention_norms_biases_and_partial_rotation(
    norm: NormKind, rotary: int, qk_norm: bool, lengths: tuple[tuple[int, int], ...]
) -> None:
    case = attention_case(
        np.random.default_rng(9), norm=norm, rotary=rotary, qk_norm=qk_norm, bias=True, lengths=lengths
    )
    assert_attention_agrees(case, 1e-5)


@over_isas(("rotary", "lengths"), [0, 8, 16], [((5, 3),), ((300, 1), (5, 1)), ((0, 40),)])
def test_attention_norms_after_the_rotation(rotary: int, lengths: tuple[tuple[int, int], ...]) -> None:
    random = np.random.default_rng(19)
    case = attention_case(random, rotary=rotary, qk_norm=True, late_norms=True, bias=True, lengths=lengths)
    assert_attention_agrees(case, 1e-5)


@over_isas(("format",), ["f32", "q4"])
def test_values_that_are_too_many_for_a_copy_per_thread(format: Format) -> None:
    """16 tokens of 640 values are prepared once for all threads; fewer tokens are prepared by each thread."""
    random = np.random.default_rng(18)
    lengths = tuple((length, 1) for length in range(16))
    case = attention_case(random, format=format, hidden=640, head_dim=32, lengths=lengths)
    assert_attention_agrees(case, tolerance(format))
    assert_ffn_agrees(ffn_case(random, format=format, hidden=640, tokens=16), tolerance(format))


@each_isa
def test_attention_over_a_long_context() -> None:
    case = attention_case(np.random.default_rng(10), lengths=((1500, 1), (600, 1)), kv_dtype="f16")
    assert_attention_agrees(case, 1e-3)


@each_isa
def test_attention_where_k_has_a_format_of_its_own() -> None:
    case = attention_case(np.random.default_rng(11), format="q4", kv_format="q8", head_dim=32)
    assert_attention_agrees(case, 4e-3)


# 7, 8 and 17 groups: records take 8 at once
@over_isas(("packed", "tokens", "hidden"), PACKS, [1, 4, 7, 30], [224, 256, 544])
def test_logits(packed: tuple[Format, Layout], tokens: int, hidden: int) -> None:
    random = np.random.default_rng(12)
    format, layout = packed
    run, data = pack(random, "row", layout, [Part("row", format, "row")], 32, hidden, 5)
    x = normal(random, tokens, hidden)
    assert_close(native.logits(run, data, x), reference.logits(run, data, x), tolerance(format))


@over_isas(("format", "tokens"), QUANTISED, [17, 64, 70])
def test_logits_of_many_tokens_have_the_bits_of_few(format: Format, tokens: int) -> None:
    random = np.random.default_rng(17)
    run, data = pack(random, "row", "tiled", [Part("row", format, "row")], 32, 544, 3)
    x = normal(random, tokens, 544)
    few = [native.logits(run, data, x[first : first + 16]) for first in range(0, tokens, 16)]
    assert np.abs(few[-1]).max() > 0
    np.testing.assert_array_equal(native.logits(run, data, x), np.concatenate(few))


@over_isas(("packed",), PACKS)
def test_gather_and_dequantise(packed: tuple[Format, Layout]) -> None:
    format, layout = packed
    random = np.random.default_rng(13)
    parts = [Part("row", format, "row"), Part("column", format, "column")]
    run, data = pack(random, "row", layout, parts, 32, 96, 3)
    rows = np.array([95, 0, 33, 33], np.int32)
    np.testing.assert_allclose(native.gather(run, data, rows), reference.gather(run, data, rows), rtol=1e-6, atol=1e-7)
    for part in ("row", "column"):
        actual, expected = native.dequantise(run, data, part), reference.dequantise(run, data, part)
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-7)


@over_isas(("hidden",), [1, 7, 64, 99])
def test_norms(hidden: int) -> None:
    random = np.random.default_rng(14)
    x, without_bias = normal(random, 3, hidden), NormSpec("layer", 1e-5, normal(random, hidden))
    for norm in (norm_spec(random, "rms", hidden), norm_spec(random, "layer", hidden), without_bias):
        assert_close(native.norm(norm, x), reference.norm(norm, x), 2e-6 if norm.kind == "rms" else 1e-5)


@pytest.mark.parametrize(("seed", "isa"), list(enumerate(len(FORMATS) * ISAS)), indirect=["isa"])
def test_random_shapes(seed: int) -> None:
    random = np.random.default_rng([15, seed])
    format: Format = FORMATS[seed % len(FORMATS)]
    hidden = int(random.integers(1, 9)) * 32
    tokens = int(random.integers(1, 40))
    assert_ffn_agrees(
        ffn_case(random, format=format, hidden=hidden, units=int(random.integers(1, 12)), tokens=tokens), 5e-3
    )
    case = attention_case(
        random,
        format=format,
        hidden=hidden,
        heads=int(random.integers(1, 10)),
        kv_heads=int(random.integers(1, 4)),
        head_dim=int(random.integers(1, 9)) * 4,
        lengths=((int(random.integers(0, 80)), tokens), (int(random.integers(0, 80)), 1)),
    )
    assert_attention_agrees(case, 5e-3)


@over_isas(("threads",), [1, 2, 3, 7])
def test_threads_do_not_change_the_result(threads: int) -> None:
    random = np.random.default_rng(16)
    ffn, attention = ffn_case(random, format="q4", units=9, tokens=3), attention_case(random, format="q4", head_dim=32)
    native.set_threads(threads)
    try:
        assert_ffn_agrees(ffn, 4e-3)
        assert_attention_agrees(attention, 4e-3)
        first = native.ffn(ffn.spec, ffn.data, ffn.x)
        for _ in range(20):
            np.testing.assert_array_equal(native.ffn(ffn.spec, ffn.data, ffn.x), first)
    finally:
        native.set_threads(2)
