"""Gated short convolutions: native against reference kernels, and a plain loop over time; one piece against several."""

from dataclasses import replace

import numpy as np
import pytest

from tests.support.kernels.kernel_cases import native, reference
from tests.support.kernels.recurrent_cases import SLOTS, conv_case, settled, slots_of
from tpi.config import Format
from tpi.errors import KernelError


@pytest.mark.parametrize("format", ["f32", "bf16", "q8", "q4"])
@pytest.mark.parametrize(
    ("lengths", "slots"),
    [((5,), ((-1, 0),)), ((1, 1, 1), ((0, 0), (-1, 2), (1, 3))), ((40, 1, 2), ((4, 4), (0, 5), (0, 1)))],
)
def test_native_equals_reference(format: Format, lengths: tuple[int, ...], slots: tuple[tuple[int, int], ...]) -> None:
    spec, data, x, states, batch = conv_case(np.random.default_rng(3), format, lengths=lengths, slots=slots)
    mine, theirs = states.copy(), states.copy()
    found = native.recur(spec, data, x, mine, batch)
    exact = format in ("f32", "bf16")
    np.testing.assert_allclose(found, reference.recur(spec, data, x, theirs, batch), atol=2e-4 if exact else 5e-2)
    np.testing.assert_allclose(mine, theirs, atol=1e-4 if exact else 5e-2)


@pytest.mark.parametrize("shape", [(96, 5, 2), (33, 33, 7), (300, 160, 64)])
def test_odd_shapes(shape: tuple[int, int, int]) -> None:
    hidden, channels, taps = shape
    spec, data, x, states, batch = conv_case(
        np.random.default_rng(4), "f32", hidden, channels, taps, (3, 70), ((-1, 0), (1, 1))
    )
    mine, theirs = states.copy(), states.copy()
    found = native.recur(spec, data, x, mine, batch)
    np.testing.assert_allclose(found, reference.recur(spec, data, x, theirs, batch), atol=1e-3)
    np.testing.assert_allclose(mine, theirs, atol=1e-4)


def test_formula() -> None:
    """The reference is compared with a loop over tokens and taps that uses the dequantised weights."""
    spec, data, x, states, batch = conv_case(np.random.default_rng(5), lengths=(6,), slots=((2, 4),))
    before = states[2].reshape(-1, spec.channels)[: spec.taps - 1].copy()
    normed = reference.norm(spec.norm, x)
    v, inputs, gate = (normed @ reference.dequantise(spec.values, data, part).T for part in ("v", "input", "gate"))
    history = np.concatenate([before, inputs * v])
    mixed = np.zeros_like(v)
    for token in range(6):
        for tap in range(spec.taps):
            mixed[token] += history[token + tap] * spec.weights[:, tap]
    wanted = (gate * mixed) @ reference.dequantise(spec.values, data, "o")
    np.testing.assert_allclose(reference.recur(spec, data, x, states, batch), wanted, atol=1e-4)
    np.testing.assert_allclose(states[4].reshape(-1, spec.channels)[:2], history[-2:], atol=1e-5)
    np.testing.assert_array_equal(states[2].reshape(-1, spec.channels)[:2], before)


@pytest.mark.parametrize("kernels", [native, reference], ids=["native", "reference"])
@pytest.mark.parametrize("cuts", [(1,), (2, 3), (1, 2, 3, 4, 5, 6, 7, 8)])
def test_a_prompt_in_pieces_ends_in_the_same_state(kernels: object, cuts: tuple[int, ...]) -> None:
    spec, data, x, states, batch = conv_case(np.random.default_rng(6), taps=5, lengths=(9,))
    whole = kernels.recur(spec, data, x, states, batch)  # type: ignore[attr-defined]
    pieces, read = [], -1
    for first, last in zip((0, *cuts), (*cuts, 9), strict=True):
        part = replace(batch.cut(slice(first, last)), states=slots_of((read, 3)))
        pieces.append(kernels.recur(spec, data, x[first:last], states, part))  # type: ignore[attr-defined]
        read = 3
    np.testing.assert_allclose(np.concatenate(pieces), whole, atol=1e-5)
    same = slice(settled(spec))
    np.testing.assert_allclose(states[3, same], states[0, same], atol=1e-4)


@pytest.mark.parametrize("pair", [(-2, 0), (SLOTS, 0), (0, -1), (0, SLOTS)])
@pytest.mark.parametrize("kernels", [native, reference], ids=["native", "reference"])
def test_states_outside_the_memory_are_refused(kernels: object, pair: tuple[int, int]) -> None:
    spec, data, x, states, batch = conv_case(np.random.default_rng(8), slots=(pair,))
    with pytest.raises(KernelError, match="state"):
        kernels.recur(spec, data, x, states, batch)  # type: ignore[attr-defined]
