"""Experts on an OpenCL device, and heads that it does not finish itself, against the reference."""

from dataclasses import replace

import numpy as np
import pytest

from tests.support.devices.opencl_device import assert_close, holding
from tests.support.kernels.expert_cases import experts_case
from tests.support.kernels.kernel_cases import attention_case, normal, reference, tolerance
from tpi.config import Format
from tpi.devices.opencl.device import OpenClDevice
from tpi.kernels.spec import WholeNorms


@pytest.mark.parametrize("format", ["f32", "q4"])
@pytest.mark.parametrize("tokens", [1, 20])
def test_experts_agree(card: OpenClDevice, format: Format, tokens: int) -> None:
    case = experts_case(np.random.default_rng(tokens), format=format, tokens=tokens, shared=2, gate=True)
    routing = reference.route(case.spec.router, case.x)
    with holding(card, case.data) as (data,):
        prepared = card.kernels.prepare(case.spec, reference.prepare(case.spec, case.x))
        actual = card.kernels.experts(case.spec, data, prepared, routing)
        chosen = card.kernels.route(case.spec.router, prepared)
    assert_close(actual, reference.experts(case.spec, case.data, case.x, routing), 2 * tolerance(format))
    np.testing.assert_array_equal(chosen.experts, routing.experts)


@pytest.mark.parametrize("whole", [True, False])
def test_heads_that_are_clipped_or_normed_together_agree(card: OpenClDevice, whole: bool) -> None:
    random = np.random.default_rng(4)
    case = attention_case(random, lengths=((5, 3), (0, 4)), bias=True)
    norms = WholeNorms(normal(random, 64), normal(random, 32), np.ones(2, np.bool_), 64, 32) if whole else None
    spec = replace(case.spec, clip=0.7, whole=norms)
    keys, values = case.kv.keys[0], case.kv.values[0]
    with holding(card, case.data, keys, values) as (data, own_keys, own_values):
        actual = card.kernels.attention(spec, data, case.x, own_keys, own_values, case.batch)
    expected = reference.attention(spec, case.data, case.x, keys.copy(), values.copy(), case.batch)
    assert_close(actual, expected, tolerance("f32"))
