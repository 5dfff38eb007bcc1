"""Features of kernels for gpt-oss: weights in MXFP4, a clamped SwiGLU, biases of experts, attention sinks."""

from dataclasses import replace

import numpy as np
import pytest

from tests.support.kernels.expert_cases import experts_case
from tests.support.kernels.isas import each_isa, over_isas
from tests.support.kernels.kernel_cases import attention_case, ffn_case, native, normal, pack, reference
from tpi.config import Format
from tpi.errors import KernelError
from tpi.kernels.kv import KvDtype
from tpi.kernels.spec import F32, ExpertPiece, FfnSpec
from tpi.pack.layout import Part

pytestmark = pytest.mark.usefixtures("isa")


def error(got: F32, expected: F32) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def clamped(spec: FfnSpec) -> FfnSpec:
    """Return `spec` with a limit that some random gates and ups exceed."""
    return replace(spec, activation="swiglu_clamped", threshold=0.6, slope=1.702)


@each_isa
def test_values_of_mxfp4_are_decoded_exactly() -> None:
    random = np.random.default_rng(5)
    parts = [Part("gate", "mxfp4", "row"), Part("down", "mxfp4", "column")]
    run, data = pack(random, "neuron", "tiled", parts, 32, 64, 3)
    data[128:136] = [0, 1, 2, 127, 251, 3, 100, 140]  # scales of a tile, the least and the largest among them
    for part in ("gate", "down"):
        expected, tiny = reference.dequantise(run, data, part), np.float32(2**-120)
        np.testing.assert_allclose(native.dequantise(run, data, part), expected, rtol=0, atol=tiny)


@over_isas(("tokens",), [1, 2, 3, 4, 7, 16, 17, 70])
def test_products_with_mxfp4(tokens: int) -> None:
    case = ffn_case(np.random.default_rng(tokens), format="mxfp4", hidden=96, tokens=tokens)
    assert error(native.ffn(case.spec, case.data, case.x), reference.ffn(case.spec, case.data, case.x)) < 4e-3


@over_isas(("format", "tokens"), ["f32", "mxfp4"], [1, 5, 40])
def test_a_clamped_gate(format: Format, tokens: int) -> None:
    case = ffn_case(np.random.default_rng(tokens), format=format, tokens=tokens, hidden=96, bias=True)
    spec = clamped(case.spec)
    expected = reference.ffn(spec, case.data, case.x)
    assert error(native.ffn(spec, case.data, case.x), expected) < (2e-5 if format == "f32" else 2e-2)
    assert error(reference.ffn(replace(spec, threshold=9.0), case.data, case.x), expected) > 0.01
    assert error(reference.ffn(replace(spec, slope=1.0), case.data, case.x), expected) > 0.01


def test_a_clamped_gate_needs_one() -> None:
    case = ffn_case(np.random.default_rng(1), gated=False)
    with pytest.raises(KernelError, match="needs a gate"):
        native.ffn(clamped(case.spec), case.data, case.x)


@over_isas(("format", "tokens"), ["f32", "mxfp4"], [1, 5, 40])
def test_down_biases_are_added_by_an_experts_first_piece(format: Format, tokens: int) -> None:
    random = np.random.default_rng(7)
    pieces = tuple(ExpertPiece(expert, 2, begins=expert != 3) for expert in range(6))
    case = experts_case(random, format=format, tokens=tokens, bias=True, pieces=pieces, hidden=96)
    biases = normal(random, 6, 96)
    spec = replace(case.spec, routed=clamped(case.spec.routed), down_bias=biases)
    routing = reference.route(spec.router, case.x)
    expected = reference.experts(spec, case.data, case.x, routing)
    assert error(native.experts(spec, case.data, case.x, routing), expected) < (2e-5 if format == "f32" else 2e-2)
    without = reference.experts(replace(spec, down_bias=None), case.data, case.x, routing)
    open_ = np.where(routing.experts != 3, routing.weights, 0)
    added = np.einsum("tu,tuh->th", open_, biases[routing.experts])
    np.testing.assert_allclose(expected - without, added, atol=1e-5)


@over_isas(
    ("kv_dtype", "lengths"),
    ["f32", "f16", "q8", "q4"],
    [((0, 5),), ((300, 1),), ((40, 1), (3, 1)), ((0, 70),), ((130, 30), (7, 2))],
)
def test_attention_sinks(kv_dtype: KvDtype, lengths: tuple[tuple[int, int], ...]) -> None:
    random = np.random.default_rng(3)
    case = attention_case(random, lengths=lengths, kv_dtype=kv_dtype)
    spec = replace(case.spec, sinks=np.array([-2.0, 0.0, 1.5, 6.0], np.float32))
    keys, values = case.kv.keys[0], case.kv.values[0]
    given = (case.data, case.x, keys.copy(), values.copy(), case.batch)
    expected = reference.attention(spec, *given)
    tolerance = 2e-5 if kv_dtype == "f32" else 1e-2
    assert (
        error(native.attention(spec, case.data, case.x, keys.copy(), values.copy(), case.batch), expected) < tolerance
    )
    assert error(reference.attention(replace(spec, sinks=None), *given), expected) > 0.02
