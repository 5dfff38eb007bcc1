"""Reduced parameter grids: every pair of values occurs together, in far fewer cases than the full grid has."""

from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st

from tests.support.kernels.pairwise import pairwise


@given(st.lists(st.integers(1, 4).map(range), min_size=2, max_size=4))
def test_any_two_values_meet(axes: list[range]) -> None:
    cases = pairwise(*axes)
    assert set(cases) <= set(product(*axes))
    for first, second in combinations(range(len(axes)), 2):
        assert {(case[first], case[second]) for case in cases} == set(product(axes[first], axes[second]))


def test_a_grid_becomes_small() -> None:
    assert len(pairwise(range(5), range(4), range(3))) == 20
    assert len(pairwise(range(4), range(2), range(2), range(2))) == 8
