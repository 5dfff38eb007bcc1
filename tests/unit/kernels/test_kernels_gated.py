"""Gate first: the native kernels choose the neurons that the reference does, and come to what it comes to."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.kernels.gated_cases import floors, gated_case
from tests.support.kernels.kernel_cases import FfnCase, ffn_case, native, reference
from tests.support.kernels.pairwise import pairwise
from tpi.config import Activation, Format
from tpi.errors import KernelError
from tpi.kernels.gated import GatedKernels, called_for
from tpi.kernels.spec import F32, FfnSpec

FORMATS: list[Format] = ["f32", "bf16", "q8", "q4", "q4s"]
TOLERANCE: dict[Format, float] = {"f32": 5e-6, "bf16": 5e-6, "q8": 1e-4, "q4": 1.5e-2, "q4s": 1.5e-2}
NOTHING = np.finfo(np.float32).max  # that no activation reaches


@pytest.fixture(autouse=True, params=native.available_isas(), scope="module")
def _isa(request: pytest.FixtureRequest) -> Iterator[None]:
    before, threads = native.isa(), native.threads()
    native.use_isa(request.param)
    native.set_threads(2)
    yield
    native.use_isa(before)
    native.set_threads(threads)


def assert_close(actual: F32, expected: F32, tolerance: float) -> None:
    assert np.isfinite(actual).all()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * max(float(np.abs(expected).max()), 1e-3))


def assert_agrees(case: FfnCase, least: F32, format: Format) -> int:
    expected, many = reference.ffn_gated(case.spec, case.data, case.x, least)
    found, count = native.ffn_gated(case.spec, case.data, case.x, least)
    assert count == many
    assert_close(found, expected, TOLERANCE[format])
    prepared, again = native.ffn_gated(case.spec, case.data, native.prepare(case.spec, case.x), least)
    np.testing.assert_array_equal(prepared, found)
    assert again == count
    return count


@pytest.mark.parametrize(("format", "share", "tokens"), pairwise(FORMATS, [0.0, 0.3, 0.9], [1, 2, 5, 16]))
def test_chosen_neurons_come_to_the_reference(format: Format, share: float, tokens: int) -> None:
    random = np.random.default_rng([1, tokens])
    case = gated_case(random, format=format, hidden=int(random.choice([96, 288])), units=5, tokens=tokens)
    count = assert_agrees(case, floors(case, share), format)
    assert abs(count - (1 - share) * 160) <= 8


@pytest.mark.parametrize(("activation", "bias"), pairwise(["silu", "gelu", "gelu_tanh"], [True, False]))
def test_activations_and_biases(activation: Activation, bias: bool) -> None:
    case = gated_case(np.random.default_rng(2), activation=activation, bias=bias, tokens=3)
    assert assert_agrees(case, floors(case, 0.5), "f32")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tokens", [1, 16, 17, 70])
def test_all_neurons_are_the_dense_block(format: Format, tokens: int) -> None:
    """With and without a choice, which many tokens do not make."""
    case = gated_case(np.random.default_rng([3, tokens]), format=format, hidden=96, tokens=tokens)
    found = native.ffn(case.spec, case.data, case.x)
    assert_close(found, reference.ffn(case.spec, case.data, case.x), TOLERANCE[format])
    chosen, count = native.ffn_gated(case.spec, case.data, case.x, np.zeros(96, np.float32))
    np.testing.assert_array_equal(chosen, found)
    assert count == 96


def test_a_token_that_needs_a_neuron_has_it_computed_for_all() -> None:
    case = gated_case(np.random.default_rng(4), tokens=4)
    least = floors(case, 0.8)
    normed = reference.norm(case.spec.norm, case.x)
    each = [set(called_for(case.spec, case.data, normed[at : at + 1], least).tolist()) for at in range(4)]
    union = called_for(case.spec, case.data, normed, least)
    assert set(union.tolist()) == set.union(*each)
    assert len(union) > max(map(len, each))
    expected = native.ffn(case.spec, case.data, case.x, union)
    found, count = native.ffn_gated(case.spec, case.data, case.x, least)
    np.testing.assert_array_equal(found, expected)
    assert count == len(union)


@pytest.mark.parametrize("format", ["f32", "q4"])
def test_no_neuron_is_nothing(format: Format) -> None:
    case = gated_case(np.random.default_rng(5), format=format, tokens=2)
    for kernels in (native, reference):
        found, count = kernels.ffn_gated(case.spec, case.data, case.x, np.full(96, NOTHING, np.float32))
        assert count == 0
        assert not found.any()


def test_floors_are_of_each_neuron() -> None:
    case = gated_case(np.random.default_rng(6))
    least = np.where(np.arange(96) % 3 == 0, np.float32(0), np.float32(NOTHING)).astype(np.float32)
    found, count = native.ffn_gated(case.spec, case.data, case.x, least)
    assert count == 32
    assert_close(found, native.ffn(case.spec, case.data, case.x, np.arange(0, 96, 3, dtype=np.int32)), 1e-6)


def test_one_thread_chooses_what_many_do() -> None:
    case = gated_case(np.random.default_rng(7), units=9, tokens=2)
    least, counts = floors(case, 0.4), set()
    for threads in (1, 3):
        native.set_threads(threads)
        counts.add(native.ffn_gated(case.spec, case.data, case.x, least)[1])
    native.set_threads(2)
    assert len(counts) == 1


def test_what_is_no_such_block_is_refused() -> None:
    assert isinstance(native, GatedKernels)
    assert isinstance(reference, GatedKernels)
    plain, case = ffn_case(np.random.default_rng(8)), gated_case(np.random.default_rng(8))
    least = np.zeros(96, np.float32)
    for kernels in (native, reference):
        with pytest.raises(KernelError, match="run of its own"):
            kernels.ffn_gated(plain.spec, plain.data, plain.x, least)
        with pytest.raises(KernelError):
            kernels.ffn_gated(case.spec, case.data[:-4], case.x, least)
    with pytest.raises(KernelError, match="least activations"):
        native.ffn_gated(case.spec, case.data, case.x, least[1:])
    spec = case.spec
    together = FfnSpec(spec.neuron, "drelu", True, spec.norm, None, None, gate=spec.gate)
    with pytest.raises(KernelError, match="of gate and up together"):
        native.ffn(together, case.data, case.x)


def test_a_gate_that_is_no_number_leaves_nothing_out() -> None:
    """Otherwise damaged weights would not be seen."""
    case = gated_case(np.random.default_rng(4), format="f32")
    x = np.full_like(case.x, np.nan)
    least = np.full_like(floors(case, 0.5), NOTHING)
    for kernels in (native, reference):
        found, count = kernels.ffn_gated(case.spec, case.data, x, least)
        assert np.isnan(found).all()
        assert count == len(called_for(case.spec, case.data, x, least)) == len(least)
