"""Collectives: every algorithm, over 1 to 9 nodes, all sizes and wire formats, gives the sum that it promises."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allreduce.base import F32, Group
from tests.collective_helpers import partials_of, run_group
from tpi.wire import open_wire

ORDERED = ["star", "mesh", "two-shot", "loopback"]
UNORDERED = ["tree", "ring"]


def in_rank_order(partials: list[F32]) -> F32:
    total = partials[0].copy()
    for partial in partials[1:]:
        np.add(total, partial, out=total)
    return total


def decoded(values: F32, wire: str) -> F32:
    codec = open_wire(wire)
    raw = np.empty(codec.nbytes(values.size), np.uint8)
    codec.encode(values.reshape(-1), raw)
    out = np.empty(values.size, np.float32)
    codec.decode(raw, out)
    return out.reshape(values.shape)


@pytest.mark.parametrize("name", ORDERED + UNORDERED)
@settings(max_examples=8, deadline=None)
@given(size=st.integers(1, 9), count=st.sampled_from([1, 2, 31, 32, 33, 576, 4096, 70_001]), seed=st.integers(0, 9))
def test_f32_sum(name: str, size: int, count: int, seed: int) -> None:
    partials = partials_of(size, count, seed)

    def member(group: Group) -> tuple[F32, F32 | None, F32]:
        first = group.allreduce(partials[group.rank]).copy()
        group.begin(2)
        second = group.reduce(partials[group.rank])
        second = None if second is None else second.copy()
        group.begin(3)
        return first, second, group.allreduce(partials[group.rank]).copy()

    results = run_group(name, size, member)
    expected = in_rank_order(partials)
    for rank, (first, second, third) in enumerate(results):
        assert (second is None) == (rank > 0)
        np.testing.assert_array_equal(first, third)
        np.testing.assert_array_equal(first, results[0][0])
        if name in ORDERED:
            np.testing.assert_array_equal(first, expected)
    np.testing.assert_allclose(results[0][0], expected, rtol=1e-4, atol=1e-3 * np.abs(expected).max())
    assert results[0][1] is not None
    np.testing.assert_allclose(results[0][1], expected, rtol=1e-4, atol=1e-3 * np.abs(expected).max())
