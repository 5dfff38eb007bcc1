"""Feed-forward blocks on an OpenCL device against the reference."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.devices.opencl_device import assert_close, holding
from tests.support.kernels.kernel_cases import PACKS, FfnCase, ffn_case, native, tolerance
from tests.support.kernels.kernel_cases import reference as reference_kernels
from tests.support.kernels.pairwise import pairwise
from tpi.config import Activation, Format
from tpi.devices.opencl.device import OpenClDevice
from tpi.errors import DeviceError, KernelError
from tpi.kernels.spec import I32
from tpi.pack.layout import RECORDS, Layout

ACTIVATIONS = [each for each in get_args(Activation) if each != "swiglu_clamped"]


def assert_ffn_agrees(card: OpenClDevice, case: FfnCase, limit: float, active: I32 | None = None) -> None:
    with holding(card, case.data) as (data,):
        actual = card.kernels.ffn(case.spec, data, case.x, active)
    assert_close(actual, reference_kernels.ffn(case.spec, case.data, case.x, active), limit)


@pytest.mark.parametrize(("format", "layout"), PACKS)
@pytest.mark.parametrize("tokens", [1, 3, 16, 40])
def test_formats_and_layouts(card: OpenClDevice, format: Format, layout: Layout, tokens: int) -> None:
    case = ffn_case(np.random.default_rng([1, tokens]), format=format, layout=layout, hidden=96, units=5, tokens=tokens)
    assert_ffn_agrees(card, case, tolerance(format))


@pytest.mark.parametrize(("activation", "gated", "format"), pairwise(ACTIVATIONS, [True, False], ["f32", "q4"]))
def test_activations_and_biases(card: OpenClDevice, activation: Activation, gated: bool, format: Format) -> None:
    random = np.random.default_rng(2)
    case = ffn_case(random, format=format, activation=activation, gated=gated, norm="layer", bias=True, tokens=3)
    case = replace(case, spec=replace(case.spec, threshold=0.1))
    assert_ffn_agrees(card, case, tolerance(format))


@pytest.mark.parametrize(
    ("layout", "formats", "tokens"),
    pairwise(["record", "tiled"], [("q4", "q8"), ("q8", "q4s"), ("q4s", "q4")], [1, 33]),
)
def test_mixed_formats(card: OpenClDevice, layout: Layout, formats: tuple[Format, Format], tokens: int) -> None:
    format, down = formats
    case = ffn_case(np.random.default_rng(3), format=format, down=down, layout=layout, hidden=160, tokens=tokens)
    assert_ffn_agrees(card, case, 4e-3)


@pytest.mark.parametrize(("hidden", "format", "tokens"), pairwise([1, 3, 19, 67], ["f32", "bf16"], [1, 19]))
def test_hidden_sizes_that_are_no_multiple_of_four(
    card: OpenClDevice, hidden: int, format: Format, tokens: int
) -> None:
    assert_ffn_agrees(card, ffn_case(np.random.default_rng(4), format=format, hidden=hidden, tokens=tokens), 2e-5)


@given(
    pack=st.sampled_from(PACKS),
    tokens=st.integers(1, 50),
    groups=st.integers(1, 6),
    units=st.integers(1, 9),
    widths=st.integers(1, 3),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_any_shape(
    card: OpenClDevice, pack: tuple[Format, Layout], tokens: int, groups: int, units: int, widths: int, seed: int
) -> None:
    format, layout = pack
    width = 32 * widths if layout == "tiled" else 5 * widths
    case = ffn_case(
        np.random.default_rng(seed), format=format, layout=layout, hidden=32 * groups, units=units, width=width,
        tokens=tokens, bias=True,
    )  # fmt: skip
    assert_ffn_agrees(card, case, tolerance(format))


@pytest.mark.parametrize(("format", "tokens", "count"), pairwise(RECORDS, [1, 18], [0, 1, 61, 95]))
def test_active_neurons(card: OpenClDevice, format: Format, tokens: int, count: int) -> None:
    random = np.random.default_rng([5, count])
    case = ffn_case(random, format=format, layout="record", activation="relu", tokens=tokens, bias=True)
    assert_ffn_agrees(card, case, tolerance(format), random.permutation(96)[:count].astype(np.int32))


@pytest.mark.parametrize(("format", "layout"), PACKS)
@pytest.mark.parametrize("tokens", [3, 40])
def test_a_block_is_prepared_once_for_its_tiles(
    card: OpenClDevice, format: Format, layout: Layout, tokens: int
) -> None:
    case = ffn_case(np.random.default_rng(6), format=format, layout=layout, hidden=96, units=5, tokens=tokens)
    run = case.spec.neuron
    kernels, split = card.kernels, 2 * run.unit_bytes
    first, second = (replace(case.spec, neuron=replace(run, units=units)) for units in (2, 3))
    with holding(card, case.data) as (data,):
        alone = [kernels.ffn(first, data[:split], case.x), kernels.ffn(second, data[split:], case.x)]
        prepared = kernels.prepare(case.spec, case.x)
        assert prepared.shape == case.x.shape
        np.testing.assert_array_equal(kernels.ffn(first, data[:split], prepared), alone[0])
        np.testing.assert_array_equal(kernels.ffn(second, data[split:], prepared), alone[1])
        from_host = kernels.prepare(case.spec, native.prepare(case.spec, case.x), into=prepared)
        assert_close(kernels.ffn(case.spec, data, from_host), alone[0] + alone[1], tolerance(format))


def test_weights_elsewhere_and_what_others_prepared_are_refused(card: OpenClDevice) -> None:
    case = ffn_case(np.random.default_rng(7), hidden=96)
    with holding(card, case.data) as (data,):
        with pytest.raises(DeviceError, match="weights must lie in the memory of opencl:0"):
            card.kernels.ffn(case.spec, case.data, case.x)
        with pytest.raises(KernelError, match="other kernels"):
            card.kernels.ffn(case.spec, data, native.prepare(case.spec, case.x))
        narrow, prepared = ffn_case(np.random.default_rng(7)).spec, card.kernels.prepare(case.spec, case.x)
        with pytest.raises(KernelError, match="hidden size of 96"):
            card.kernels.ffn(narrow, data[: narrow.neuron.units * narrow.neuron.unit_bytes], prepared)
        with pytest.raises(KernelError, match="contiguous bytes"):
            card.kernels.ffn(case.spec, data[4:], case.x)
        with pytest.raises(KernelError, match="outside"):
            card.kernels.ffn(case.spec, data, case.x, np.array([96], np.int32))
        freed = data
    with pytest.raises(DeviceError, match="weights must lie"):
        card.kernels.ffn(case.spec, freed, case.x)
    tiled = ffn_case(np.random.default_rng(8), format="q4")
    with holding(card, tiled.data) as (data,), pytest.raises(KernelError, match="record layout"):
        card.kernels.ffn(tiled.spec, data, tiled.x, np.array([1], np.int32))


def test_no_tokens_and_no_units(card: OpenClDevice) -> None:
    case = ffn_case(np.random.default_rng(9), format="q4")
    none = replace(case.spec, neuron=replace(case.spec.neuron, units=0))
    with holding(card, case.data) as (data,):
        assert card.kernels.ffn(case.spec, data, case.x[:0]).shape == (0, 64)
        np.testing.assert_array_equal(card.kernels.ffn(none, data[:0], case.x), np.zeros_like(case.x))
