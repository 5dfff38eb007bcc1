"""Balancing requests over micro-batches: none is lost, no micro-batch exceeds its limits, and sums are close."""

from hypothesis import given
from hypothesis import strategies as st

from master.batch.balance import Lengths, in_order, micro_batches

LENGTHS = st.builds(Lengths, st.integers(1, 300), st.integers(0, 100))


@given(st.lists(LENGTHS, max_size=40), st.integers(1, 9), st.integers(50, 2000))
def test_every_request_is_placed_once_within_the_bounds_or_waits(requests: list[Lengths], most: int, room: int) -> None:
    placed, aborted = micro_batches(requests, most, room)
    assert sorted([at for part in placed for at in part] + aborted) == list(range(len(requests)))
    assert all(0 < len(part) <= most for part in placed)
    assert all(sum(requests[at].total for at in part) <= room for part in placed)


@given(st.lists(LENGTHS, max_size=40), st.integers(1, 9), st.integers(1, 2000))
def test_an_order_has_all_requests_even_those_that_have_no_room(requests: list[Lengths], most: int, room: int) -> None:
    assert sorted(in_order(requests, most, room)) == list(range(len(requests)))


@given(st.lists(LENGTHS, min_size=1, max_size=40), st.integers(1, 9))
def test_partial_micro_batches_differ_by_one_prompt_at_most(requests: list[Lengths], most: int) -> None:
    """While none is full, the micro-batch that got the last prompt had the fewest tokens before."""
    count = -(-len(requests) // most)
    placed, _ = micro_batches(requests, len(requests), 1 << 40)
    assert len(placed) == 1
    placed, _ = micro_batches(requests, most, 1 << 40)
    sums = [sum(requests[at].prompt for at in part) for part in placed if len(part) < most]
    if len(sums) == count:
        assert max(sums) - min(sums) <= max(request.prompt for request in requests)


def test_long_and_short_prompts_are_mixed() -> None:
    requests = [Lengths(tokens, 10) for tokens in (100, 90, 80, 10, 20, 30)]
    placed, aborted = micro_batches(requests, 2, 1000)
    assert (sorted(map(sorted, placed)), aborted) == ([[0, 3], [1, 4], [2, 5]], [])


def test_a_request_without_room_comes_in_the_next_batch() -> None:
    requests = [Lengths(60, 30), Lengths(50, 30), Lengths(40, 30)]
    assert micro_batches(requests, 3, 100) == ([[0]], [1, 2])
    assert in_order(requests, 3, 100) == [0, 1, 2]
