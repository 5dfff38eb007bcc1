"""The number of requests that fit at once, if not all requested ones do."""

from collections.abc import Callable

import pytest

from master.deployment.planner import most_that_fit
from tpi.errors import PlanError


def fitting(most: int, tried: list[int]) -> Callable[[int], str]:
    """Return a planner that refuses more than `most` requests and appends each tried number to `tried`."""

    def plans(requests: int) -> str:
        tried.append(requests)
        if requests > most:
            raise PlanError(f"{requests} do not fit")
        return f"for {requests}"

    return plans


@pytest.mark.parametrize("wanted", [1, 2, 3, 7, 64, 500, 512, 4096])
def test_few_tries_find_the_most_that_fit_to_one_in_32(wanted: int) -> None:
    for most in {1, 2, 3, wanted // 3, wanted // 2, 4 * wanted // 5, wanted - 1, wanted, wanted + 9} - {0}:
        tried: list[int] = []
        found, plans = most_that_fit(wanted, fitting(most, tried))
        best = min(most, wanted)
        assert best * 31 / 32 - 1 < found <= best
        assert plans == f"for {found}"
        assert len(tried) == len(set(tried)) <= wanted.bit_length() + 6
        assert found < wanted or tried == [wanted]


def test_four_hundred_of_five_hundred_are_not_halved() -> None:
    tried: list[int] = []
    found, _ = most_that_fit(500, fitting(400, tried))
    assert 390 < found <= 400
    assert tried[:3] == [500, 250, 375]


def test_where_not_one_fits_it_says_why() -> None:
    with pytest.raises(PlanError, match=r"^1 do not fit$"):
        most_that_fit(500, fitting(0, []))
