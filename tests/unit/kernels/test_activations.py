"""Activations that are exactly 0 for most neurons: ReLU squared, FATReLU, ReLU of gate and up."""

from dataclasses import replace

import numpy as np
import pytest

from tests.support.kernels.kernel_cases import FfnCase, ffn_case
from tests.support.kernels.pairwise import pairwise
from tpi.config import SPARSE, Activation, Format
from tpi.kernels import open_kernels
from tpi.kernels.arithmetic import activate, apply_norm, biased, dequantise
from tpi.kernels.spec import F32
from tpi.pack.layout import Layout

NEW: tuple[Activation, ...] = ("relu2", "fatrelu", "drelu")
THRESHOLD = 0.4


def case_of(activation: Activation, gated: bool, layout: Layout, format: Format, tokens: int) -> FfnCase:
    random = np.random.default_rng(7)
    found = ffn_case(random, format=format, layout=layout, activation=activation, gated=gated, tokens=tokens, bias=True)
    return replace(found, spec=replace(found.spec, threshold=THRESHOLD))


def plain(case: FfnCase) -> F32:
    """Compute the block by the formulas of the papers, in float64."""
    spec, run = case.spec, case.spec.neuron
    x = apply_norm(spec.norm, case.x).astype(np.float64)
    up = biased(x @ dequantise(run, case.data, "up").T, spec.up_bias)
    gate = biased(x @ dequantise(run, case.data, "gate").T, spec.gate_bias) if spec.gated else up
    kept = np.maximum(gate, 0)
    acted = {"relu2": kept**2, "fatrelu": gate * (gate > THRESHOLD), "drelu": kept * np.maximum(up, 0)}[spec.activation]
    inner = acted * up if spec.gated and spec.activation != "drelu" else acted
    return np.asarray(inner @ dequantise(run, case.data, "down"), np.float32)


@pytest.mark.parametrize(
    ("activation", "gated"),
    [("relu2", True), ("relu2", False), ("fatrelu", True), ("fatrelu", False), ("drelu", True)],
)
@pytest.mark.parametrize("tokens", [1, 20])
def test_both_kernels_follow_the_formula(activation: Activation, gated: bool, tokens: int) -> None:
    case = case_of(activation, gated, "record", "f32", tokens)
    expected = plain(case)
    for name in ("native", "reference"):
        found = open_kernels(name).ffn(case.spec, case.data, case.x)
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("activation", "packed", "tokens"), pairwise(NEW, [("record", "q4"), ("tiled", "q8"), ("tiled", "q4s")], [1, 20])
)
def test_native_is_what_the_reference_says(activation: Activation, packed: tuple[Layout, Format], tokens: int) -> None:
    layout, format = packed
    case = case_of(activation, True, layout, format, tokens)
    expected = open_kernels("reference").ffn(case.spec, case.data, case.x)
    found = open_kernels("native").ffn(case.spec, case.data, case.x)
    assert np.abs(found - expected).max() < 2e-2 * np.abs(expected).max()


@pytest.mark.parametrize("activation", sorted(SPARSE))
@pytest.mark.parametrize("name", ["native", "reference"])
def test_neurons_that_are_not_active_add_nothing(activation: Activation, name: str) -> None:
    case = case_of(activation, True, "record", "f32", 1)
    normed = apply_norm(case.spec.norm, case.x)
    up, gate = (
        biased(normed @ dequantise(case.spec.neuron, case.data, part).T, bias)
        for part, bias in (("up", case.spec.up_bias), ("gate", case.spec.gate_bias))
    )
    active = np.flatnonzero(activate(case.spec, gate, up)[0]).astype(np.int32)
    assert 0 < len(active) < up.shape[1]
    kernels = open_kernels(name)
    every = kernels.ffn(case.spec, case.data, case.x)
    some = kernels.ffn(case.spec, case.data, case.x, active)
    np.testing.assert_allclose(some, every, rtol=1e-5, atol=1e-5 * np.abs(every).max())


def test_what_equals_the_threshold_is_dropped_and_nan_stays() -> None:
    spec = case_of("fatrelu", True, "record", "f32", 1).spec
    x = np.array([THRESHOLD, np.nextafter(np.float32(THRESHOLD), np.float32(1)), -1, np.nan], np.float32)
    found = activate(spec, x, np.ones_like(x))
    np.testing.assert_array_equal(found, np.array([0, x[1], 0, np.nan], np.float32))
