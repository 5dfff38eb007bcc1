"""Mamba2 blocks: native against reference kernels, one piece against several, and norms that are spread over nodes."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from allreduce._mailbox import quantise
from tests.support.kernels.isas import over_isas
from tests.support.kernels.kernel_cases import layout_of, native, norm_spec, normal, pack, reference
from tpi.config import Format
from tpi.kernels.recurrent.squares import apply_spread
from tpi.kernels.spec import F32, U8, Batch, ChainBlock, MambaSpec, Residual, SpreadNorm
from tpi.net.wire import wire_format
from tpi.pack.layout import Part

SLOTS = 6
Shape = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class MambaCase:
    spec: MambaSpec
    data: U8
    x: F32
    states: F32
    batch: Batch


def mamba_case(
    seed: int,
    shape: Shape = (4, 2, 16, 32, 4),
    lengths: tuple[int, ...] = (5,),
    slots: tuple[tuple[int, int], ...] = ((-1, 0),),
    format: Format = "f32",
    hidden: int = 64,
) -> MambaCase:
    """A random block; `lengths` are the tokens of each sequence in the step, `slots` their states."""
    (heads, key_heads, key, value, taps), random = shape, np.random.default_rng(seed)
    parts = [Part("v", format, "row"), Part("gate", format, "row"), Part("o", format, "column")]
    values, value_data = pack(random, "value", layout_of(format), parts, value, hidden, heads)
    parts = [Part(name, format, "row") for name in ("q", "k")]
    keys, key_data = pack(random, "key", layout_of(format), parts, key, hidden, key_heads)
    spec = MambaSpec(
        values=values,
        keys=keys,
        heads=heads,
        key_heads=key_heads,
        key=key,
        value=value,
        taps=taps,
        key_index=np.arange(heads, dtype=np.int32) * key_heads // heads,
        norm=norm_spec(random, "rms", hidden),
        a=normal(random, heads, hidden, scale=hidden**-0.5),
        decay=-np.exp(normal(random, heads)),
        decay_bias=normal(random, heads),
        skip=normal(random, heads),
        least_step=0.3,
        most_step=1.5,
        conv_q=normal(random, key_heads * key, taps),
        conv_k=normal(random, key_heads * key, taps),
        conv_v=normal(random, heads * value, taps),
        conv_bias=normal(random, 2 * key_heads * key + heads * value),
        out_norm=normal(random, heads * value),
        out_eps=0.01,
        spread=SpreadNorm(heads * value, 0.01) if key_heads == 1 else None,
    )
    rows = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)
    batch = Batch(np.zeros(len(rows), np.int32), rows, np.zeros((len(lengths), 1), np.int32), np.array(slots, np.int32))
    states = normal(random, SLOTS, spec.state_values)
    return MambaCase(spec, np.concatenate([value_data, key_data]), normal(random, len(rows), hidden), states, batch)


def check(case: MambaCase, spec: MambaSpec, atol: float, state_atol: float) -> None:
    """The native kernels against the reference."""
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
    """Also where nothing of a state fades, and where it fades to exactly 0 within a token."""
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
        batch = replace(case.batch.cut(slice(first, last)), states=np.array([[read, 3]], np.int32))
        pieces.append(kernels.recur(case.spec, case.data, case.x[first:last], states, batch))  # type: ignore[attr-defined]
        read = 3
    np.testing.assert_allclose(np.concatenate(pieces), whole, atol=1e-4)
    np.testing.assert_allclose(states[3], case.states[0], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 2, 3, 7])
def test_a_spread_norm_equals_one_of_all_heads_in_one_place(tokens: int) -> None:
    """A chain norms the results itself, as its node has all heads."""
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
    """Those of one token are a thousand times those of another, and are not rounded to their scale."""
    case = mamba_case(7, (4, 1, 16, 32, 4), (4,))
    partial = native.recur(case.spec, case.data, case.x, case.states, case.batch)
    squares = partial[4:].reshape(-1)[::32].copy()
    for scale in (1e-3, 1.0, 1e3):
        partial[4:].reshape(4, 32)[1] = squares[1] * scale
        received = partial.reshape(-1).copy()
        quantise(received, wire_format("q8").code)
        np.testing.assert_allclose(received[4 * 64 :], partial[4:].reshape(-1), rtol=1e-3)
