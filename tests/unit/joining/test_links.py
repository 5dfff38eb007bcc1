"""Broken links between workers are told apart from slow nodes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allreduce.deadline import MISSING_S, Lateness
from master.workers.links import CONFIRMED_S, LinkWatch, broken_link, last_awaited

NOBODY = -1


@pytest.mark.parametrize(
    ("missed", "done", "link"),
    [
        ([NOBODY, 2, 1], [], (1, 2)),  # each misses the other: the one of the higher rank goes
        ([1, 2, 1], [], (1, 2)),  # the master waits for one of them, too
        ([NOBODY, 2, 3, 1], [], (2, 3)),  # a ring of workers
        ([2, 0, 1], [], (2, 1)),  # a ring with the master in it: only one of its links is between workers
        ([NOBODY, 2, NOBODY], [2], (1, 2)),  # it has sent all of its step
        ([1, 2, NOBODY], [2], (1, 2)),
        ([NOBODY, 2, NOBODY], [], None),  # it computes
        ([NOBODY, 2, 3, NOBODY], [], None),  # for one that computes
        ([1, 0, NOBODY], [], None),  # the master's own links are told of by heartbeats
        ([NOBODY, 0, 0], [], None),
        ([NOBODY, NOBODY, NOBODY], [1, 2], None),
        ([NOBODY, 9, NOBODY], [], None),  # of an earlier plan, with more nodes
    ],
)
def test_it_names_unreachable_pairs(missed: list[int], done: list[int], link: tuple[int, int] | None) -> None:
    assert broken_link(missed, [rank in done for rank in range(len(missed))]) == link


@given(st.lists(st.integers(-1, 7), min_size=1, max_size=8), st.sets(st.integers(0, 7)))
def test_a_broken_link_is_one_on_which_a_worker_waits(missed: list[int], done: set[int]) -> None:
    found = broken_link(missed, [rank in done for rank in range(len(missed))])
    if found:
        waits, ahead = found
        assert waits > 0 < ahead
        assert missed[waits] == ahead
        assert missed[ahead] != NOBODY or ahead in done


def test_it_has_to_stand_for_two_heartbeats() -> None:
    circles, stuck, free = LinkWatch(), [NOBODY, 2, 1], [NOBODY, 2, NOBODY]
    assert not circles.look(stuck, [False] * 3, 10)
    assert not circles.look(free, [False] * 3, 10 + CONFIRMED_S)
    assert not circles.look(stuck, [False] * 3, 10.1 + CONFIRMED_S)
    assert circles.look(stuck, [False] * 3, 10.2 + 2 * CONFIRMED_S) == (1, 2)


def wait(late: Lateness, begun: float, seconds: float, rank: int = 1) -> float:
    """Wait as the mailbox does, looking every tenth of a second; return when the wait ended."""
    for tenth in range(round(seconds * 10) + 1):
        late.look(rank, tenth == 0, begun + tenth / 10)
    return begun + seconds


def test_a_message_is_late_after_a_while_until_it_comes() -> None:
    late = Lateness()
    assert late.rank(100.0) == NOBODY
    now = wait(late, 100.0, MISSING_S - 0.2, rank=3)
    assert late.rank(now) == NOBODY
    for tenths in range(1, 5):
        late.look(3, False, now + tenths / 10)
    assert late.rank(now + 0.4) == 3
    assert late.rank(now + 1) == NOBODY  # it has come, and the node computes


def test_several_waits_are_not_one() -> None:
    late, now = Lateness(), 100.0
    for _ in range(20):
        now = wait(late, now, 0.5) + 0.01
        assert late.rank(now) == NOBODY


def test_on_a_link_that_takes_long_messages_are_late_later() -> None:
    late, now = Lateness(), 100.0
    for seconds in (0.4, 0.4, 3.0, 0.4):  # a packet was sent again, twice
        now = wait(late, now, seconds) + 1
    now = wait(late, now, 2 * MISSING_S)
    assert late.rank(now) == NOBODY
    for tenths in range(1, 30):
        late.look(1, False, now + tenths / 10)
    assert late.rank(now + 2.9) == 1


def test_messages_of_a_long_prompt_have_time_on_a_slow_link() -> None:
    late = Lateness()
    late.expect(4 << 20)
    now = wait(late, 100.0, 30.0)
    assert late.rank(now) == NOBODY
    late.expect(8 << 10)
    assert late.rank(now) == 1


def test_a_pause_of_this_process_is_nobodys_fault() -> None:
    late = Lateness()
    late.look(1, True, 100.0)
    late.look(1, False, 3700.0)
    assert late.rank(3700.0) == NOBODY


@pytest.mark.parametrize(
    ("missed", "last"),
    [
        ([NOBODY, NOBODY, NOBODY], 1),
        ([2, 3, NOBODY], 3),  # a chain of stages
        ([3, NOBODY, 0], 3),  # that one waits for the master
        ([2, 1, NOBODY], 2),  # a circle
        ([9, NOBODY, NOBODY], 1),  # of an earlier plan, with more nodes
    ],
)
def test_the_end_of_a_chain_of_waits_is_found(missed: list[int], last: int) -> None:
    assert last_awaited(1, missed) == last
