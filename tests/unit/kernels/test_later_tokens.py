"""Dropped tokens of a step leave no trace in a state: its bits are those of a run without them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.kernels.isas import ISAS
from tests.support.kernels.kernel_cases import native, reference
from tests.support.kernels.recurrent_cases import conv_case, delta_case, mamba_case, slots_of
from tpi.config import Format
from tpi.errors import KernelError
from tpi.kernels import Kernels
from tpi.kernels.spec import F32, LATER, STREAM_TOKENS, U8, Batch, RecurrentSpec

TOKENS = 80


@dataclass(frozen=True)
class Block:
    """A block, and its input for `TOKENS` tokens of one sequence."""

    spec: RecurrentSpec
    data: U8
    x: F32
    states: F32

    def run(self, kernels: Kernels, states: F32, x: F32, own: tuple[int, int, int, int]) -> F32:
        """Return the result of one step of the sequence, with its states `own` as in `Batch.states`."""
        rows = np.zeros(len(x), np.int32)
        batch = Batch(rows, rows, np.zeros((1, 1), np.int32), np.array([own], np.int32))
        return kernels.recur(self.spec, self.data, x, states, batch)


Made = Callable[[Format], Block]
Blocks = Callable[[Made, Format], Block]


def _delta(format: Format) -> Block:
    case = delta_case(
        np.random.default_rng(1), format=format, heads=6, key_heads=3, key=24, value=96, lengths=(TOKENS,)
    )
    return Block(case.spec, case.data, case.x, case.states)


def _mamba(format: Format) -> Block:
    case = mamba_case(2, (4, 2, 16, 32, 4), (TOKENS,), format=format)
    return Block(case.spec, case.data, case.x, case.states)


def _conv(format: Format) -> Block:
    spec, data, x, states, _ = conv_case(np.random.default_rng(3), format, taps=5, lengths=(TOKENS,))
    return Block(spec, data, x, states)


@pytest.fixture(scope="module")
def blocks() -> Blocks:
    """Return a function that makes each block once."""
    found = dict[tuple[Made, Format], Block]()

    def get(made: Made, format: Format) -> Block:
        if (made, format) not in found:
            found[made, format] = made(format)
        return found[made, format]

    return get


@dataclass(frozen=True)
class Drafted:
    """A step of `count` tokens, the first `right` of which are kept; if `moves`, the state goes to another slot."""

    count: int
    right: int
    moves: bool


def steps(longest: int) -> st.SearchStrategy[Drafted]:
    return st.integers(1, longest).flatmap(
        lambda count: st.builds(
            Drafted,
            st.just(count),
            st.integers(1, count) if count <= STREAM_TOKENS else st.just(count),
            st.booleans(),
        )
    )


@pytest.mark.parametrize("isa", ISAS, indirect=True)
@pytest.mark.parametrize("format", ["f32", "q4"])
@pytest.mark.parametrize("made", [_delta, _mamba, _conv])
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asked=st.lists(steps(STREAM_TOKENS + 5), max_size=12))
def test_a_run_with_dropped_tokens_has_the_bits_of_one_without(
    made: Made, format: Format, asked: list[Drafted], isa: str, blocks: Blocks
) -> None:
    """The other run computes tokens of short steps one by one, in another slot."""
    block, noise = blocks(made, format), np.random.default_rng(len(asked))
    states, position, read, taken, plain = block.states.copy(), 0, -1, 0, -1
    for step in asked:
        if position + step.count > TOKENS:
            break
        x = block.x[position : position + step.count].copy()
        x[step.right :] += noise.normal(size=x[step.right :].shape).astype(np.float32)
        write = (read + 1) % 3 if step.moves or read < 0 else read
        later = step.count - 1 if step.count <= STREAM_TOKENS else 0
        before = states.copy()
        found = block.run(native, states, x, (read, write, taken, later))
        kept = [slot for slot in range(len(states)) if slot != write]
        np.testing.assert_array_equal(states[kept], before[kept])
        pieces = [slice(at, at + 1) for at in range(step.right)] if later or step.count == 1 else [slice(step.count)]
        for piece in pieces:
            alone = block.run(native, states, x[piece], (plain, 4, 0, 0))
            rows = slice(piece.start or 0, piece.stop)
            np.testing.assert_array_equal(found[rows], alone[: rows.stop - rows.start])
            plain = 4
        position, read, taken = position + step.right, write, step.right - 1 if later else 0


@pytest.mark.parametrize("made", [_delta, _mamba, _conv])
def test_native_equals_reference_where_tokens_are_taken_and_stored(made: Made) -> None:
    block = made("f32")
    mine, theirs = block.states.copy(), block.states.copy()
    for first, last, own in (
        (0, 6, (-1, 0, 0, 5)),
        (3, 12, (0, 1, 2, 8)),
        (12, 40, (1, 1, 8, 0)),
        (40, 56, (1, 0, 0, 15)),
    ):
        found = block.run(native, mine, block.x[first:last], own)
        np.testing.assert_allclose(found, block.run(reference, theirs, block.x[first:last], own), atol=1e-3)
        np.testing.assert_allclose(mine, theirs, atol=1e-3)


@pytest.mark.parametrize("made", [_delta, _mamba, _conv])
@pytest.mark.parametrize("kernels", [native, reference], ids=["native", "reference"])
@pytest.mark.parametrize(
    ("own", "message"),
    [
        ((0, 0, LATER + 1, 0), "fewer later tokens"),
        ((0, 0, -1, 0), "fewer later tokens"),
        ((-1, 0, 1, 0), "fewer later tokens"),
        ((0, 0, 0, -1), "fewer later tokens"),
        ((0, 0, 0, LATER + 1), "fewer later tokens"),
        ((0, 0, 0, 3), "first token"),
    ],
)
def test_later_tokens_that_cannot_be_are_refused(
    made: Made, kernels: Kernels, own: tuple[int, int, int, int], message: str
) -> None:
    block = made("f32")
    with pytest.raises(KernelError, match=message):
        block.run(kernels, block.states.copy(), block.x[:3], own)


def test_sequences_of_a_step_take_and_store_their_own_tokens() -> None:
    case = delta_case(np.random.default_rng(4), lengths=(3, 4), slots=((-1, 0), (-1, 1)))
    states, alone = case.states.copy(), case.states.copy()
    first = replace(case.batch, states=slots_of((-1, 0), (-1, 1)) + np.array([[0, 0, 0, 2], [0, 0, 0, 3]], np.int32))
    native.recur(case.spec, case.data, case.x, states, first)
    second = replace(case.batch, states=slots_of((0, 0), (1, 1)) + np.array([[0, 0, 1, 2], [0, 0, 3, 3]], np.int32))
    found = native.recur(case.spec, case.data, case.x, states, second)
    for rows, slot, taken in ((slice(0, 3), 0, 1), (slice(3, 7), 1, 3)):
        block = Block(case.spec, case.data, case.x[rows], case.states)
        block.run(native, alone, block.x, (-1, slot, 0, len(block.x) - 1))
        np.testing.assert_array_equal(
            found[rows], block.run(native, alone, block.x, (slot, slot, taken, len(block.x) - 1))
        )
    np.testing.assert_array_equal(states[:2], alone[:2])
