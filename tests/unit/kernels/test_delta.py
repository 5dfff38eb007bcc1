"""Gated DeltaNet blocks: native and reference kernels, one piece and several, and stored states."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.support.kernels.isas import over_isas
from tests.support.kernels.kernel_cases import native, reference
from tests.support.kernels.recurrent_cases import SLOTS, delta_case, settled, slots_of
from tpi.config import Format
from tpi.errors import KernelError
from tpi.kernels.memory import buffer_bytes
from tpi.pack.reader import Pack


@pytest.mark.parametrize("format", ["f32", "bf16", "q8", "q4"])
@pytest.mark.parametrize(
    ("lengths", "slots"),
    [((5,), ((-1, 0),)), ((1, 1, 1), ((0, 0), (-1, 2), (1, 3))), ((40, 1, 2), ((4, 4), (0, 5), (0, 1)))],
)
def test_native_equals_reference(format: Format, lengths: tuple[int, ...], slots: tuple[tuple[int, int], ...]) -> None:
    random = np.random.default_rng(3)
    case = delta_case(random, format=format, lengths=lengths, slots=slots)
    mine, theirs = case.states.copy(), case.states.copy()
    found = native.recur(case.spec, case.data, case.x, mine, case.batch)
    wanted = reference.recur(case.spec, case.data, case.x, theirs, case.batch)
    np.testing.assert_allclose(found, wanted, atol=2e-4 if format in ("f32", "bf16") else 2e-2)
    np.testing.assert_allclose(mine, theirs, atol=1e-3)


@pytest.mark.parametrize("shape", [(2, 1, 8, 8, 2), (6, 3, 20, 12, 3), (3, 3, 5, 7, 6), (8, 2, 128, 128, 4)])
def test_odd_shapes(shape: tuple[int, int, int, int, int]) -> None:
    heads, key_heads, key, value, taps = shape
    random = np.random.default_rng(4)
    case = delta_case(
        random,
        heads=heads,
        key_heads=key_heads,
        key=key,
        value=value,
        taps=taps,
        lengths=(3, 7),
        slots=((-1, 0), (1, 1)),
    )
    mine, theirs = case.states.copy(), case.states.copy()
    found = native.recur(case.spec, case.data, case.x, mine, case.batch)
    np.testing.assert_allclose(found, reference.recur(case.spec, case.data, case.x, theirs, case.batch), atol=1e-3)
    np.testing.assert_allclose(mine, theirs, atol=1e-3)


CHUNKED = ((4, 2, 16, 32, 4), (6, 3, 20, 44, 3), (3, 1, 7, 40, 2), (4, 2, 128, 128, 4))
LENGTHS = ((8,), (32,), (70,), (33, 9, 1), (64, 7, 31))


@pytest.mark.usefixtures("isa")
@over_isas(("shape", "lengths", "fading"), CHUNKED, LENGTHS, [0.0, 1.0, 60.0])
def test_chunks_of_tokens_equal_the_reference(
    shape: tuple[int, int, int, int, int], lengths: tuple[int, ...], fading: float
) -> None:
    """Also if a state does not decay, and if it decays to exactly 0 within a token."""
    heads, key_heads, key, value, taps = shape
    slots = tuple((row - 1, row) for row in range(len(lengths)))
    case = delta_case(
        np.random.default_rng(9), heads=heads, key_heads=key_heads, key=key, value=value, taps=taps, lengths=lengths,
        slots=tuple((read if read < 0 else 5 - read, write) for read, write in slots),
    )  # fmt: skip
    spec = replace(case.spec, decay=case.spec.decay * np.float32(fading))
    mine, theirs = case.states.copy(), case.states.copy()
    found = native.recur(spec, case.data, case.x, mine, case.batch)
    np.testing.assert_allclose(found, reference.recur(spec, case.data, case.x, theirs, case.batch), atol=3e-4)
    np.testing.assert_allclose(mine, theirs, atol=3e-5, rtol=1e-4)


@pytest.mark.usefixtures("isa")
def test_threads_do_not_change_the_bits() -> None:
    """With more threads, each computes fewer columns of a state at once."""
    case = delta_case(np.random.default_rng(10), heads=5, key_heads=5, value=96, lengths=(70,))
    found = []
    for threads in (1, 8):
        native.set_threads(threads)
        states = case.states.copy()
        found.append((native.recur(case.spec, case.data, case.x, states, case.batch), states))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][1], found[1][1])


@pytest.mark.parametrize("kernels", [native, reference], ids=["native", "reference"])
@pytest.mark.parametrize("cuts", [(1,), (8, 40), (33, 34, 35), (2, 3, 70), tuple(range(1, 80))])
def test_a_prompt_in_pieces_ends_in_the_same_state(kernels: object, cuts: tuple[int, ...]) -> None:
    case = delta_case(np.random.default_rng(5), lengths=(80,), slots=((-1, 0),))
    whole, states = kernels.recur(case.spec, case.data, case.x, case.states, case.batch), case.states.copy()  # type: ignore[attr-defined]
    pieces, read = [], -1
    for first, last in zip((0, *cuts), (*cuts, 80), strict=True):
        batch = replace(case.batch.cut(slice(first, last)), states=slots_of((read, 3)))
        pieces.append(kernels.recur(case.spec, case.data, case.x[first:last], states, batch))  # type: ignore[attr-defined]
        read = 3
    np.testing.assert_allclose(np.concatenate(pieces), whole, atol=3e-5)
    same = slice(settled(case.spec))
    np.testing.assert_allclose(states[3, same], case.states[0, same], atol=1e-5)


def test_a_state_that_is_read_stays_as_it_was() -> None:
    case = delta_case(np.random.default_rng(6), slots=((2, 4),))
    before = case.states.copy()
    native.recur(case.spec, case.data, case.x, case.states, case.batch)
    changed = [slot for slot in range(SLOTS) if not np.array_equal(before[slot], case.states[slot])]
    assert changed == [4]


def test_a_cut_batch_continues_from_the_state_that_its_first_part_wrote() -> None:
    case = delta_case(np.random.default_rng(7), lengths=(4, 4), slots=((2, 0), (-1, 1)))
    batch = replace(case.batch, states=slots_of((2, 0), (-1, 1)) + np.array([[0, 0, 7, 0], [0, 0, 0, 0]], np.int32))
    for part, states in (
        (slice(0, 2), [[2, 0, 7, 0], [-1, 1, 0, 0]]),
        (slice(2, 6), [[0, 0, 0, 0], [-1, 1, 0, 0]]),
        (slice(6, 8), [[0, 0, 0, 0], [1, 1, 0, 0]]),
    ):
        assert batch.cut(part).states.tolist() == states  # type: ignore[union-attr]


@pytest.mark.parametrize("pair", [(-2, 0), (SLOTS, 0), (0, -1), (0, SLOTS)])
@pytest.mark.parametrize("kernels", [native, reference], ids=["native", "reference"])
def test_states_outside_the_memory_are_refused(kernels: object, pair: tuple[int, int]) -> None:
    case = delta_case(np.random.default_rng(8), slots=(pair,))
    with pytest.raises(KernelError, match="state"):
        kernels.recur(case.spec, case.data, case.x, case.states, case.batch)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("heads", "own"), [(6, 6), (3, 3), (1, 1), (0, 0)])
def test_buffers_of_value_heads_are_counted(heads: int, own: int, tiny_pack: Callable[..., Pack]) -> None:
    """They count if they need more than attention does; a node has its share of the value heads, or one more."""
    config = tiny_pack("qwen35").config
    assert config.delta is not None
    assert config.heads == config.delta.heads == 6
    wide = replace(config, delta=replace(config.delta, value=1024))
    channels = 2 * min(own, wide.delta.key_heads) * wide.delta.key + own * 1024  # type: ignore[union-attr]
    counted = buffer_bytes(wide, heads, 1, 0)
    assert 4 * (2 * channels + 3 * own * 1024) <= counted <= 4 * (2 * channels + 5 * (own + 1) * 1024) + 4096
