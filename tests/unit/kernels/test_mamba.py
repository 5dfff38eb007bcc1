"""Mamba2 blocks: native and reference kernels, one piece and several, and norms over several nodes."""

from dataclasses import replace

import numpy as np
import pytest

from allreduce._mailbox import quantise
from tests.support.kernels.isas import over_isas
from tests.support.kernels.kernel_cases import native, reference
from tests.support.kernels.recurrent_cases import MambaCase, Shape, mamba_case, settled, slots_of
from tpi.config import Format
from tpi.kernels.recurrent.squares import apply_spread
from tpi.kernels.spec import ChainBlock, MambaSpec, Residual
from tpi.net.wire import wire_format


def check(case: MambaCase, spec: MambaSpec, atol: float, state_atol: float) -> None:
    """Compare the native kernels with the reference."""
    mine, theirs = case.states.copy(), case.states.copy()
    found = native.recur(spec, case.data, case.x, mine, case.batch)
    wanted = reference.recur(spec, case.data, case.x, theirs, case.batch)
    np.testing.assert_allclose(found, wanted, atol=atol, rtol=1e-4)
    np.testing.assert_allclose(mine, theirs, atol=state_atol, rtol=1e-4)


@pytest.mark.parametrize("key_heads", [1, 2])
@pytest.mark.parametrize("format", ["f32", "bf16", "q8", "q4"])
@pytest.mark.parametrize(
    ("lengths", "slots"),
    [((5,), ((-1, 0),)), ((1, 1, 1), ((0, 0), (-1, 2), (1, 3))), ((40, 1, 2), ((4, 4), (0, 5), (0, 1)))],
)
def test_native_equals_reference(
    format: Format, lengths: tuple[int, ...], slots: tuple[tuple[int, int], ...], key_heads: int
) -> None:
    case = mamba_case(3, (4, key_heads, 16, 32, 4), lengths, slots, format)
    exact = format in ("f32", "bf16")
    check(case, case.spec, 3e-4 if exact else 0.3, 1e-3)


@pytest.mark.usefixtures("isa")
@over_isas(
    ("shape", "lengths", "fading"),
    ((2, 1, 8, 8, 2), (6, 3, 20, 44, 3), (3, 1, 7, 40, 2), (4, 2, 128, 64, 4)),
    ((8,), (70,), (33, 9, 1)),
    [0.0, 1.0, 60.0],
)
def test_chunks_of_tokens_equal_the_reference(shape: Shape, lengths: tuple[int, ...], fading: float) -> None:
    """Also if a state does not decay, and if it decays to exactly 0 within a token."""
    slots = tuple((row - 1 if row < 1 else 6 - row, row) for row in range(len(lengths)))
    case = mamba_case(9, shape, lengths, slots)
    check(case, replace(case.spec, decay=case.spec.decay * np.float32(fading), conv_bias=None), 5e-4, 1e-4)


@pytest.mark.usefixtures("isa")
def test_threads_do_not_change_the_bits() -> None:
    case = mamba_case(10, (5, 1, 16, 96, 4), (70,))
    found = []
    for threads in (1, 8):
        native.set_threads(threads)
        states = case.states.copy()
        found.append((native.recur(case.spec, case.data, case.x, states, case.batch), states))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][1], found[1][1])


@pytest.mark.parametrize("kernels", [native, reference], ids=["native", "reference"])
@pytest.mark.parametrize("cuts", [(1,), (8, 40), (33, 34, 35), tuple(range(1, 80))])
def test_a_prompt_in_pieces_ends_in_the_same_state(kernels: object, cuts: tuple[int, ...]) -> None:
    case = mamba_case(5, lengths=(80,))
    whole, states = kernels.recur(case.spec, case.data, case.x, case.states, case.batch), case.states.copy()  # type: ignore[attr-defined]
    pieces, read = [], -1
    for first, last in zip((0, *cuts), (*cuts, 80), strict=True):
        batch = replace(case.batch.cut(slice(first, last)), states=slots_of((read, 3)))
        pieces.append(kernels.recur(case.spec, case.data, case.x[first:last], states, batch))  # type: ignore[attr-defined]
        read = 3
    np.testing.assert_allclose(np.concatenate(pieces), whole, atol=1e-4)
    same = slice(settled(case.spec))
    np.testing.assert_allclose(states[3, same], case.states[0, same], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 2, 3, 7])
def test_a_spread_norm_equals_one_of_all_heads_in_one_place(tokens: int) -> None:
    """A chain computes the norm itself, because its node has all heads."""
    case = mamba_case(6, (4, 1, 16, 32, 4), (tokens,))
    norm = case.spec.spread
    assert norm is not None
    partial = native.recur(case.spec, case.data, case.x, case.states.copy(), case.batch)
    assert partial.shape == (tokens + -(-tokens // 2), 64)
    residual = Residual(spread=norm)
    chained = native.open_chain([ChainBlock(case.spec, case.data, residual, states=case.states.copy())])
    alone = reference.recur(replace(case.spec, spread=None), case.data, case.x, case.states.copy(), case.batch)
    np.testing.assert_allclose(apply_spread(norm, partial, tokens), alone, atol=1e-4)
    np.testing.assert_allclose(native.add_residual(residual, case.x, partial), case.x + alone, atol=1e-4)
    np.testing.assert_allclose(chained.run(case.x, case.batch), case.x + alone, atol=1e-4)


def test_sums_of_squares_survive_a_quantised_wire() -> None:
    """One token's sums are a thousand times another's, and are not rounded with the same scale."""
    case = mamba_case(7, (4, 1, 16, 32, 4), (4,))
    partial = native.recur(case.spec, case.data, case.x, case.states, case.batch)
    squares = partial[4:].reshape(-1)[::32].copy()
    for scale in (1e-3, 1.0, 1e3):
        partial[4:].reshape(4, 32)[1] = squares[1] * scale
        received = partial.reshape(-1).copy()
        quantise(received, wire_format("q8").code)
        np.testing.assert_allclose(received[4 * 64 :], partial[4:].reshape(-1), rtol=1e-3)
