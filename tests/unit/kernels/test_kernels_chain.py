"""A chain of blocks has the bits of single blocks, checks its arguments as they do, and can be interrupted."""

import signal
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.support.kernels.kernel_cases import AttentionCase, FfnCase, attention_case, ffn_case, native, reference
from tests.support.kernels.pairwise import pairwise
from tpi.config import Format
from tpi.errors import KernelError
from tpi.kernels import Kernels
from tpi.kernels.normspec import NormKind
from tpi.kernels.spec import F32, AttentionSpec, Batch, ChainBlock, FfnSpec, NormSpec, Residual
from tpi.trace import clock

HIDDEN, EPS = 64, 1e-5
LENGTHS = {"one token": ((40, 1),), "a prompt": ((0, 40),), "three sequences": ((3, 1), (70, 1), (0, 1))}


def residual(random: np.random.Generator, kind: str) -> Residual:
    """Return a residual connection: plain, with a bias, or with a bias and a norm of the kind."""
    bias, weight = (random.standard_normal(HIDDEN).astype(np.float32) for _ in range(2))
    if kind in ("plain", "bias"):
        return Residual(None if kind == "plain" else bias)
    return Residual(bias, NormSpec("rms", EPS, weight) if kind == "rms" else NormSpec("layer", EPS, weight, bias))


def chain_blocks(
    random: np.random.Generator, format: Format, lengths: Sequence[tuple[int, int]]
) -> tuple[list[ChainBlock], Batch]:
    """Return two layers, each followed by another residual connection; the second one norms only its outputs."""
    found: list[ChainBlock] = []
    case: AttentionCase | None = None
    norms: tuple[tuple[NormKind, str, str], ...] = (("rms", "plain", "bias"), ("none", "rms", "layer"))
    for norm, first, second in norms:
        case = attention_case(random, format=format, hidden=HIDDEN, norm=norm, lengths=tuple(lengths), kv_dtype="f16")
        ffn: FfnCase = ffn_case(random, format=format, hidden=HIDDEN, norm=norm)
        found.append(ChainBlock(case.spec, case.data, residual(random, first), case.kv.keys[0], case.kv.values[0]))
        found.append(ChainBlock(ffn.spec, ffn.data, residual(random, second)))
    assert case is not None
    return found, case.batch


def one_by_one(kernels: Kernels, parts: Sequence[ChainBlock], x: F32, batch: Batch) -> F32:
    for part in parts:
        if isinstance(part.spec, FfnSpec):
            partial = kernels.ffn(part.spec, part.data, x)
        else:
            assert isinstance(part.spec, AttentionSpec)
            assert part.keys is not None
            assert part.values is not None
            partial = kernels.attention(part.spec, part.data, x, part.keys.copy(), part.values.copy(), batch)
        x = kernels.add_residual(part.residual, x, partial)
    return x


@pytest.mark.parametrize(
    ("lengths", "format", "kernels"), pairwise([*LENGTHS.values()], ["f32", "q8", "q4"], [native, reference])
)
def test_a_chain_has_the_bits_of_its_half_blocks(
    kernels: Kernels, format: Format, lengths: tuple[tuple[int, int], ...]
) -> None:
    random = np.random.default_rng(1)
    parts, batch = chain_blocks(random, format, lengths)
    x = random.standard_normal((len(batch.positions), HIDDEN)).astype(np.float32)
    expected = one_by_one(kernels, parts, x, batch)
    before = x.copy()
    np.testing.assert_array_equal(kernels.open_chain(parts).run(x, batch), expected)
    np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize("kernels", [native, reference], ids=["native", "reference"])
def test_a_chain_with_end_times_computes_the_same(kernels: Kernels) -> None:
    random = np.random.default_rng(4)
    parts, batch = chain_blocks(random, "q4", LENGTHS["three sequences"])
    x = random.standard_normal((len(batch.positions), HIDDEN)).astype(np.float32)
    chain, ended = kernels.open_chain(parts), np.full(len(parts), -1, np.int64)
    began = clock()
    out = chain.run(x, batch, ended)
    took = clock() - began
    assert ended[0] > 0
    assert ended[-1] <= took
    assert all(np.diff(ended) > 0)
    np.testing.assert_array_equal(out, chain.run(x, batch))


def test_arrays_that_do_not_fit_are_refused() -> None:
    random = np.random.default_rng(2)
    parts, batch = chain_blocks(random, "q4", LENGTHS["one token"])
    with pytest.raises(KernelError, match="the weights"):
        native.open_chain([replace(parts[0], data=parts[0].data[1:]), *parts[1:]])
    with pytest.raises(KernelError, match="the key cache"):
        native.open_chain([replace(parts[0], keys=None)])
    other = ffn_case(random, format="q4", hidden=2 * HIDDEN)
    with pytest.raises(KernelError, match="hidden size"):
        native.open_chain([*parts, ChainBlock(other.spec, other.data, Residual())])
    none = ffn_case(random, format="q4", hidden=HIDDEN, units=0)
    with pytest.raises(KernelError, match="no units"):
        native.open_chain([ChainBlock(none.spec, none.data, Residual())])
    with pytest.raises(KernelError, match="norm"):
        native.open_chain(
            [replace(parts[1], residual=Residual(norm=NormSpec("rms", EPS, np.ones(HIDDEN - 1, np.float32))))]
        )
    chain = native.open_chain(parts)
    with pytest.raises(KernelError, match="x has the shape"):
        chain.run(np.zeros((1, HIDDEN + 1), np.float32), batch)
    with pytest.raises(KernelError, match="outside the"):
        chain.run(np.zeros((1, HIDDEN), np.float32), replace(batch, tables=batch.tables + 100))
    with pytest.raises(KernelError, match="ended has the shape"):
        chain.run(np.zeros((1, HIDDEN), np.float32), batch, np.zeros(len(parts) - 1, np.int64))


class StopError(Exception):
    """The error that the signal handler raises."""


def test_a_signal_ends_a_long_chain() -> None:
    """After Ctrl-C, a step that takes seconds is interrupted."""

    def stop(*_: object) -> None:
        raise StopError

    case = ffn_case(np.random.default_rng(3), format="f32", hidden=512, units=64, tokens=64)
    long = [ChainBlock(case.spec, case.data, Residual())] * 20_000  # minutes of work
    batch = Batch(np.arange(64, dtype=np.int32), np.zeros(64, np.int32), np.zeros((1, 2), np.int32))
    chain = native.open_chain(long)

    def run() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.2)  # here: its end must not come before it is expected
        chain.run(case.x, batch)

    previous = signal.signal(signal.SIGALRM, stop)
    try:
        with pytest.raises(StopError):
            run()
    finally:
        signal.signal(signal.SIGALRM, previous)
