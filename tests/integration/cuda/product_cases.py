"""Products, norms and tables on the card against the reference: every format, layout and form of kernel."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.devices.held import held
from tests.support.kernels.kernel_cases import PACKS, FfnCase, ffn_case, norm_spec, normal, pack, reference
from tpi.config import Activation, Format
from tpi.devices.cuda import products
from tpi.devices.cuda.activations import Activations
from tpi.devices.cuda.device import CudaDevice
from tpi.errors import DeviceError, KernelError
from tpi.kernels.arithmetic import round_activations
from tpi.kernels.spec import F32, I32, NormSpec
from tpi.pack.layout import RECORDS, Layout, Part

TIGHT = 5e-6
ROUNDED = 4e-3  # an activation may round to the neighbouring int8
TOLERANCE: dict[Format, float] = {"f32": TIGHT, "bf16": TIGHT, "f16": TIGHT, "q8": 1e-4}


def assert_close(actual: F32, expected: F32, tolerance: float) -> None:
    """Check that two arrays differ by at most `tolerance` of the largest value."""
    assert actual.shape == expected.shape
    assert actual.dtype == np.float32
    assert np.isfinite(actual).all()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * max(float(np.abs(expected).max()), 1e-3))


def assert_ffn_agrees(device: CudaDevice, case: FfnCase, tolerance: float, active: I32 | None = None) -> None:
    with held(device, case.data) as (data,):
        actual = device.kernels.ffn(case.spec, data, case.x, active)
        assert_close(actual, reference.ffn(case.spec, case.data, case.x, active), tolerance)


@pytest.mark.parametrize(
    ("format", "layout", "tokens"),
    [
        *((*each, tokens) for each in PACKS for tokens in (1, 18)),
        ("q8", "tiled", 3),
        ("q4", "record", 3),
        ("f32", "record", 3),
    ],
)
def test_ffn(device: CudaDevice, format: Format, layout: Layout, tokens: int) -> None:
    """One token, several tokens (padded to four), and square blocks of many tokens, the last of which is not full."""
    hidden = 64 if tokens == 18 else 32
    case = ffn_case(
        np.random.default_rng([1, tokens]), format=format, layout=layout, hidden=hidden, units=2, tokens=tokens
    )
    assert_ffn_agrees(device, case, TOLERANCE.get(format, ROUNDED))


@pytest.mark.parametrize("format", ["q8", "q4", "q4s"])
def test_codes_as_float16_give_the_same_sums(
    device: CudaDevice, format: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensor cores of compute capability 7.5 cannot multiply int8."""
    case = ffn_case(np.random.default_rng(6), format=format, layout="tiled", hidden=64, units=2, tokens=18)
    with held(device, case.data) as (data,):
        expected = device.kernels.ffn(case.spec, data, case.x)
        monkeypatch.setattr(products, "_multiplies_int8", lambda _: False)
        np.testing.assert_array_equal(device.kernels.ffn(case.spec, data, case.x), expected)


@pytest.mark.parametrize(("format", "down", "layout"), [("q4", "q8", "record"), ("q8", "q4s", "tiled")])
@pytest.mark.parametrize("tokens", [2, 17])
def test_ffn_of_mixed_formats(device: CudaDevice, format: Format, down: Format, layout: Layout, tokens: int) -> None:
    random = np.random.default_rng(2)
    case = ffn_case(random, format=format, down=down, layout=layout, hidden=32, units=1, tokens=tokens)
    assert_ffn_agrees(device, case, ROUNDED)


@pytest.mark.parametrize(
    ("activation", "gated"),
    [
        *((each, True) for each in ("silu", "gelu", "gelu_tanh", "relu", "relu2", "fatrelu", "drelu")),
        ("relu", False),
        ("gelu_tanh", False),
    ],
)
def test_activations_and_biases(device: CudaDevice, activation: Activation, gated: bool) -> None:
    random = np.random.default_rng(3)
    case = ffn_case(random, hidden=32, activation=activation, gated=gated, norm="layer", bias=True, tokens=2, units=1)
    assert_ffn_agrees(device, replace(case, spec=replace(case.spec, threshold=0.4)), TIGHT)


@pytest.mark.parametrize("hidden", [1, 19, 100])
@pytest.mark.parametrize(("format", "tokens"), [("f32", 1), ("bf16", 17)])
def test_hidden_sizes_that_fill_no_groups(device: CudaDevice, hidden: int, format: Format, tokens: int) -> None:
    case = ffn_case(np.random.default_rng(4), format=format, hidden=hidden, units=1, width=5, tokens=tokens)
    assert_ffn_agrees(device, case, 2e-5)


@pytest.mark.parametrize("format", RECORDS)
@pytest.mark.parametrize(("tokens", "count"), [(1, 40), (17, 9)])
def test_active_neurons(device: CudaDevice, format: Format, tokens: int, count: int) -> None:
    random = np.random.default_rng([5, count])
    case = ffn_case(random, format=format, layout="record", activation="relu", bias=True, tokens=tokens)
    assert_ffn_agrees(device, case, TOLERANCE.get(format, ROUNDED), random.permutation(96)[:count].astype(np.int32))


def test_more_columns_than_one_program_adds(device: CudaDevice) -> None:
    case = ffn_case(np.random.default_rng(6), format="q4", layout="record", hidden=32, units=5, tokens=1)
    assert_ffn_agrees(device, case, ROUNDED)


@pytest.mark.parametrize(
    ("format", "layout", "tokens"), [*((*each, 1) for each in PACKS), ("q4s", "tiled", 20), ("bf16", "record", 20)]
)
def test_logits(device: CudaDevice, format: Format, layout: Layout, tokens: int) -> None:
    """17 groups: more than one program takes at once, and not a multiple of that number."""
    random = np.random.default_rng(7)
    run, table = pack(random, "row", layout, [Part("row", format, "row")], 32, 544, 2)
    x = normal(random, tokens, 544)
    with held(device, table) as (data,):
        assert_close(
            device.kernels.logits(run, data, x), reference.logits(run, table, x), TOLERANCE.get(format, ROUNDED)
        )


@pytest.mark.parametrize(("format", "layout"), PACKS)
def test_gather_and_dequantise(device: CudaDevice, format: Format, layout: Layout) -> None:
    parts = [Part("row", format, "row"), Part("column", format, "column")]
    run, table = pack(np.random.default_rng(8), "row", layout, parts, 32, 96, 2)
    rows = np.array([63, 0, 33, 33], np.int32)
    with held(device, table) as (data,):
        found = device.kernels.gather(run, data, rows)
        np.testing.assert_allclose(found, reference.gather(run, table, rows), rtol=1e-6, atol=1e-7)
        for part in ("row", "column"):
            found = device.kernels.dequantise(run, data, part)
            np.testing.assert_allclose(found, reference.dequantise(run, table, part), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("hidden", [1, 7, 99])
def test_norms(device: CudaDevice, hidden: int) -> None:
    random = np.random.default_rng(9)
    x, without_bias = normal(random, 3, hidden), NormSpec("layer", 1e-5, normal(random, hidden))
    for norm in (norm_spec(random, "rms", hidden), norm_spec(random, "layer", hidden), without_bias):
        assert_close(device.kernels.norm(norm, x), reference.norm(norm, x), 1e-5)


@pytest.mark.parametrize("weights", ["q4", "q8"])
def test_activations_are_rounded_as_the_reference_rounds_them(device: CudaDevice, weights: Format) -> None:
    """Ties may differ, because the division by the largest value may differ in its last bit."""
    import torch

    x = normal(np.random.default_rng(10), 3, 96)
    x[1, 32:64] = 0
    there = torch.tensor(x, device="cuda" if device.name.startswith("cuda:") else "cpu")
    rounded = Activations(there).rounded(weights == "q8")
    codes = rounded.codes.cpu().numpy().astype(np.float32)
    if rounded.rest is not None:
        codes += rounded.rest.cpu().numpy().astype(np.float32) / 128
    values = codes.reshape(3, 3, 32) * rounded.scales.cpu().numpy()[..., None]
    step = float(np.abs(x).max()) / 127 / (128 if weights == "q8" else 1)
    np.testing.assert_allclose(values.reshape(x.shape), round_activations(x, weights), rtol=1e-6, atol=1.01 * step)
    assert np.abs(values.reshape(x.shape) - x).max() < 0.51 * step


@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value encountered in cast")  # the interpreter's
def test_what_is_no_number_is_seen(device: CudaDevice) -> None:
    case = ffn_case(np.random.default_rng(11), format="q4", units=1, tokens=2)
    case.x[1, 5] = np.nan
    with held(device, case.data) as (data,):
        found = device.kernels.ffn(case.spec, data, case.x)
    assert np.isfinite(found[0]).all()
    assert np.isnan(found[1]).all()


def test_a_block_is_prepared_once_and_elsewhere(device: CudaDevice) -> None:
    case = ffn_case(np.random.default_rng(12), format="q4", hidden=32, units=1, norm="layer", tokens=3)
    kernels = device.kernels
    prepared = kernels.prepare(case.spec, case.x)
    assert prepared.shape == (3, 32)
    assert_close(prepared.values(), reference.norm(case.spec.norm, case.x), 1e-5)
    with held(device, case.data) as (data,):
        once = kernels.ffn(case.spec, data, prepared)
        np.testing.assert_array_equal(once, kernels.ffn(case.spec, data, case.x))
        host = reference.prepare(case.spec, case.x)
        assert_close(kernels.ffn(case.spec, data, kernels.prepare(case.spec, host)), once, ROUNDED)
        with pytest.raises(KernelError, match="other kernels"):
            kernels.ffn(case.spec, data, host)
        narrow = ffn_case(np.random.default_rng(13), format="q4", hidden=64)
        with pytest.raises(KernelError, match="hidden size of 64"):
            kernels.ffn(case.spec, data, kernels.prepare(narrow.spec, narrow.x))


def test_what_does_not_fit_is_refused(device: CudaDevice) -> None:
    case = ffn_case(np.random.default_rng(14), format="q4", units=2, tokens=2)
    kernels, none = device.kernels, np.empty(0, np.int32)
    wrong: Any = case.x.astype(np.float64)
    with held(device, case.data, np.zeros(case.data.size + 16, np.uint8)) as (data, wide):
        for weights, x, active, what in (
            (data[:-1], case.x, None, "contiguous bytes"),
            (wide[1 : case.data.size + 1], case.x, None, "not aligned to 4 bytes"),
            (data, wrong, None, "contiguous float32"),
            (data, case.x, none, "record layout"),
        ):
            with pytest.raises(KernelError, match=what):
                kernels.ffn(case.spec, weights, x, active)
        with pytest.raises(DeviceError, match="weights must lie in the memory of cuda"):
            kernels.ffn(case.spec, case.data, case.x)
        run = case.spec.neuron
        with pytest.raises(KernelError, match="a row is outside"):
            kernels.gather(run, data, np.array([64], np.int32))
        with pytest.raises(KernelError, match="contiguous int32"):
            kernels.gather(run, data, np.array([0], np.int64))


def test_nothing_comes_of_nothing(device: CudaDevice) -> None:
    """No tokens, no units, or no active neurons."""
    case = ffn_case(np.random.default_rng(15), format="q4", layout="record", units=1, tokens=2)
    with held(device, case.data) as (data,):
        none = np.empty(0, np.int32)
        np.testing.assert_array_equal(device.kernels.ffn(case.spec, data, case.x, none), np.zeros_like(case.x))
        assert device.kernels.ffn(case.spec, data, case.x[:0]).shape == (0, 64)
        empty = replace(case.spec, neuron=replace(case.spec.neuron, units=0))
        np.testing.assert_array_equal(device.kernels.ffn(empty, data[:0], case.x), np.zeros_like(case.x))
        device.kernels.read(data)
        device.kernels.read(data[:3])
