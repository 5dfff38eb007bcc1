"""Wire formats: decoded values equal the encoded ones, within the format's promised error."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from allreduce._mailbox import payload_bytes, quantise
from tpi.errors import UsageError
from tpi.net.wire import GROUP, wire_format, wire_names

floats = hnp.arrays(np.float32, st.integers(1, 200), elements=st.floats(-(2.0**100), 2.0**100, width=32))
modest = hnp.arrays(np.float32, st.integers(1, 200), elements=st.floats(-60000, 60000, width=32))


def there_and_back(name: str, values: np.ndarray) -> np.ndarray:
    out: np.ndarray = values.copy()
    quantise(out, wire_format(name).code)
    return out


def test_sizes() -> None:
    sizes = {name: [wire_format(name).nbytes(count) for count in (1, 32, 33)] for name in wire_names()}
    assert sizes == {"f32": [4, 128, 132], "bf16": [2, 64, 66], "q8": [34, 34, 68]}


@given(st.integers(0, 1 << 20))
def test_sizes_are_those_of_the_frames(count: int) -> None:
    for wire in map(wire_format, wire_names()):
        assert payload_bytes(wire.code, count) == wire.nbytes(count)


def test_unknown_name_lists_the_alternatives() -> None:
    with pytest.raises(UsageError, match="f32, bf16, q8"):
        wire_format("fp4")
    with pytest.raises(ValueError, match="no wire format 3"):
        quantise(np.ones(3, np.float32), 3)


@given(floats)
def test_f32_is_exact(values: np.ndarray) -> None:
    np.testing.assert_array_equal(there_and_back("f32", values), values)


@given(floats)
def test_bf16_rounds_to_nearest_even(values: np.ndarray) -> None:
    bits = values.view(np.uint32).astype(np.uint64)
    low, upper = bits & 0xFFFF, bits >> 16
    up = (low > 0x8000) | ((low == 0x8000) & (upper % 2 == 1))
    expected = ((upper + up) << 16).astype(np.uint32).view(np.float32)
    np.testing.assert_array_equal(there_and_back("bf16", values), expected)


@given(floats)
def test_q8_is_codes_times_the_scale_to_the_bit(values: np.ndarray) -> None:
    groups = np.zeros((-(-values.size // GROUP), GROUP), np.float32)
    groups.reshape(-1)[: values.size] = values
    scale = np.minimum(np.abs(groups).max(axis=1) / 127, np.float32(65504)).astype(np.float16).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.clip(np.rint(groups * (1 / scale)[:, None]), -127, 127)
    expected = np.where(scale[:, None] == 0, 0, codes).astype(np.float32) * scale[:, None]
    np.testing.assert_array_equal(there_and_back("q8", values), expected.reshape(-1)[: values.size])


@given(modest)
def test_q8_error_is_half_a_step(values: np.ndarray) -> None:
    padded = np.zeros(-(-values.size // GROUP) * GROUP, np.float32)
    padded[: values.size] = values
    largest = np.abs(padded.reshape(-1, GROUP)).max(axis=1)
    step = np.repeat(largest / 127, GROUP)[: values.size]
    # f16 rounds the step by 2^-11 of itself, or by 2^-25 where it is subnormal; 127 steps of it
    allowed = step * (0.5 + 127 * 2.0**-11) * 1.001 + 128 * 2.0**-25
    assert (np.abs(there_and_back("q8", values) - values) <= allowed).all()


@pytest.mark.parametrize("name", ["bf16", "q8"])
@given(values=modest)
def test_decoded_values_encode_to_themselves(name: str, values: np.ndarray) -> None:
    once = there_and_back(name, np.where(np.abs(values) < 1, 0, values).astype(np.float32))
    np.testing.assert_allclose(there_and_back(name, once), once, rtol=1e-3)


@pytest.mark.parametrize("name", wire_names())
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_finite_stays_not_finite(name: str, bad: float) -> None:
    values = np.ones(40, np.float32)
    values[3] = bad
    assert not np.isfinite(there_and_back(name, values)[3])


def test_q8_beyond_f16_saturates() -> None:
    out = there_and_back("q8", np.array([1e30, -1e30], np.float32))
    assert np.isfinite(out).all()
    assert out[0] > 8e6 > -8e6 > out[1]


@pytest.mark.parametrize("name", wire_names())
@given(values=modest, cut=st.integers(0, 6))
def test_parts_cut_at_groups_encode_as_the_whole(name: str, values: np.ndarray, cut: int) -> None:
    first = min(cut * GROUP, values.size)
    parts = [there_and_back(name, part) for part in (values[:first], values[first:]) if part.size]
    np.testing.assert_array_equal(np.concatenate(parts), there_and_back(name, values))
