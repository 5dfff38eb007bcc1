"""The measured distance of a worker, and its allowed silence: late answers and late reading do not count."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from master.workers.cluster import Cluster
from master.workers.heartbeats import _AGAIN_S, _EXCHANGES, _FAR_S, SILENCE_S, HeartbeatState, RoundTrip
from tests.support.house import until
from tests.support.processes.hostile_worker import Hostile, hostile
from tpi.net.questions import Echo


def measured(link: RoundTrip, now: float, delays: list[float], look_s: float = 0.01) -> float:
    """Measure a link with answers that come after `delays` and are read every `look_s`; return the last time."""
    for delay in delays:
        while not link.due(now):
            now += look_s
        number, arrives = link.begin(now), now + delay
        while now < arrives:
            now += look_s
        link.answered(number, now)
    return now


def test_a_first_answer_that_is_read_late_makes_no_link_far() -> None:
    """An idle master reads a joining worker's message up to a quarter of a second late."""
    heard = HeartbeatState()
    heard.link.took(0.25)
    assert heard.limit > 6
    measured(heard.link, 1000.0, [0.001])
    assert heard.limit == SILENCE_S


def test_a_busy_worker_is_not_far() -> None:
    link = RoundTrip()
    link.took(30.0)
    measured(link, 1000.0, [0.9, 0.3, 0.02, 0.7])
    assert not link.far


def test_a_far_link_stays_far_and_is_measured_on() -> None:
    link = RoundTrip()
    now = measured(link, 1000.0, [0.9, 0.45, 0.6, 0.41, 2.5, 0.43])
    assert 0.41 <= link.seconds < 0.43
    assert not link.due(now)
    assert link.due(now + _AGAIN_S)


def test_a_near_link_is_left_in_peace() -> None:
    link = RoundTrip()
    now = measured(link, 1000.0, [0.001] * _EXCHANGES)
    assert not link.due(now + 1e6)
    assert not link.awaited(now)


def test_an_answer_that_never_comes_is_asked_for_again() -> None:
    link = RoundTrip()
    lost = link.begin(1000.0)
    assert link.awaited(1000.5)
    assert not link.due(1003.0)
    assert not link.awaited(1003.0)  # close looks end at some time
    again = 1000.0 + 1.1 * _AGAIN_S
    assert link.due(again)
    assert link.begin(again) != lost
    link.answered(lost, again + 0.001)
    link.answered(0, again + 0.001)
    assert link.seconds == 0
    assert link.awaited(again + 0.002)


@given(
    st.floats(0, 1), st.lists(st.floats(0, 5), min_size=_EXCHANGES, max_size=12), st.floats(0.001, 0.3)
)  # fmt: skip
def test_the_least_of_all_is_the_links(trip: float, late: list[float], look_s: float) -> None:
    """The result is never below the link's time, and equals it if one answer came and was read in time."""
    link = RoundTrip()
    measured(link, 1000.0, [trip + extra for extra in [*late[:3], 0.0]], look_s)
    assert trip <= link.seconds + 1e-6
    assert link.seconds <= trip + look_s + 1e-6
    assert link.far == (link.seconds >= _FAR_S)


def echoing(_: Hostile, message: object) -> list[object]:
    return [message] if isinstance(message, Echo) else []


def test_joining_an_idle_master_measures_the_real_link() -> None:
    """The worker is called in the background, where the master usually reads only four times a second."""
    with hostile(echoing) as worker, Cluster.connect([]) as cluster:
        cluster.seek(worker.address)
        until(lambda: any(one.heartbeats.link.seconds for one in cluster.recruits.called))
        (called,) = cluster.recruits.called
        until(lambda: not called.heartbeats.link.far)
        assert called.heartbeats.limit == SILENCE_S


@pytest.mark.parametrize("number", [1, 1 << 62])
def test_an_answer_that_was_not_asked_for_counts_for_nothing(number: int) -> None:
    link = RoundTrip()
    link.answered(number, 1000.0)
    assert link.seconds == 0
