"""Closed forms of the paper's propositions against the exact timeline."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from scheduler.model.placement import Placement, Speeds, place, place_window
from scheduler.model.ring import Ring
from scheduler.model.steady import (
    SteadyReport,
    Times,
    advise,
    is_loose,
    is_tight,
    judge_streaming,
    layer_seconds,
    least_resident,
    longest_retain,
    sufficient_ring,
)
from scheduler.model.timeline import Costs, OtherWaits, replay, simulate

seconds = st.integers(0, 40).map(float)
some_times = st.builds(Times, seconds, seconds, seconds, seconds, seconds)
slow_disks = st.builds(
    lambda times, extra: replace(times, load_ffn=times.load_ffn + max(0.0, times.busy - times.load) + extra),
    some_times,
    st.integers(1, 40),
)
quick = settings(max_examples=150, deadline=None)


def ring_of(layers: int, window: int) -> Ring:
    """Return a ring in which everything is streamed and exactly `window` blocks are in memory."""
    blocks = tuple(range(2 * layers))
    return Ring(window, blocks, (0,) * len(blocks), (window,) * len(blocks))


@quick
@given(some_times, st.integers(1, 6), st.integers(2, 5))
def test_time_per_layer_is_the_timelines(times: Times, window: int, layers: int) -> None:
    assume(window < 2 * layers)
    timeline = simulate(ring_of(layers, window), times.costs(layers), 60)
    assert timeline.steady_token == pytest.approx(layers * layer_seconds(times, window), rel=0.01, abs=1e-9)


@quick
@given(some_times, st.integers(1, 12))
def test_proposition_3_needs_only_its_first_condition(times: Times, layers: int) -> None:
    """If (4) holds, then (5) or (6) of the paper holds for every prefix."""
    assume(is_loose(times))
    t_attn, t_ffn, t_ar = times.attention, times.ffn, times.allreduce
    tau_attn, tau_ffn = times.load_attention, times.load_ffn
    prefixes = range(1, layers + 1)
    case_1 = all(
        n * t_attn + (n - 1) * t_ffn + (2 * n - 1) * t_ar >= n * tau_ffn + (n - 1) * tau_attn for n in prefixes
    )
    case_2 = all(
        n * t_ffn + (n - 1) * t_attn + (2 * n - 1) * t_ar >= n * tau_attn + (n - 1) * tau_ffn for n in prefixes
    )
    assert case_1 == (t_attn + t_ar >= tau_ffn)
    assert case_1 or case_2


@quick
@given(some_times)
def test_tight_implies_loose_and_a_window_of_two(times: Times) -> None:
    assume(is_tight(times))
    assert is_loose(times)
    assert layer_seconds(times, 2) == times.busy
    assert simulate(ring_of(4, 2), times.costs(4), 60).steady_stall == pytest.approx(0)


@quick
@given(some_times)
def test_without_retention_the_loose_condition_decides(times: Times) -> None:
    stall = simulate(ring_of(4, 3), times.costs(4), 60).steady_stall
    assert (stall <= 0.01 * max(times.busy, 1)) == is_loose(times)


@quick
@given(slow_disks, st.integers(1, 4))
def test_proposition_6(times: Times, retain: int) -> None:
    """With a ring deep enough for T layers, one resident FFN block in T suffices exactly if the proposition says so."""
    layers = 4 * retain
    streamed = [b for b in range(2 * layers) if b % 2 == 0 or (b // 2) % retain != retain - 1]
    depth = 2 * retain + 2
    ring = Ring(depth, tuple(streamed), (0,) * len(streamed), (depth,) * len(streamed))
    timeline = simulate(ring, times.costs(layers), 60)
    enough = retain * times.busy >= retain * times.load_attention + (retain - 1) * times.load_ffn
    assert (timeline.steady_stall <= 0.002 * timeline.steady_token) == enough
    longest = longest_retain(times)
    assert (longest is not None and retain <= longest) == enough


def test_the_papers_example_is_loose_but_not_tight() -> None:
    """Attention loads quickly and FFN slowly; each makes up for the other."""
    times = Times(0.011, 0.017, 0.014, 0.018, 0.030)
    assert is_loose(times)
    assert not is_tight(times)
    window, retain, _ = advise([64 << 12, 129 << 12] * 32, times) or (0, 0, 0)
    assert (window, retain) == (2, 0)


def test_advice_reaches_the_steady_state() -> None:
    times = Times(0.010, 0.020, 0.005, 0.020, 0.045)
    advised = advise([64 << 12, 128 << 12] * 16, times)
    assert advised is not None
    window, retain, memory = advised
    placement = place_window([64 << 12, 128 << 12] * 16, window, retain)
    assert placement.memory_bytes == memory
    report = judge_streaming(placement, times.costs(16))
    assert report.steady
    assert not report.loose
    assert not judge_streaming(place_window([64 << 12, 128 << 12] * 16, 2), times.costs(16)).steady


@pytest.mark.parametrize("window", [1, 2, 5])
def test_what_waits_is_not_advised(window: int) -> None:
    """By the means, a window of one would do; but sometimes a load is late, and the step waits."""
    sizes = [64 << 12, 128 << 12] * 16
    times = Times(0.010, 0.020, 0.050, 0.010, 0.020)
    late = replace(times, load_ffn=0.9).costs(16)
    assert judge_streaming(place_window(sizes, 3), times.costs(16)).window == 1
    report = judge_streaming(place_window(sizes, window), times.costs(16), [late])
    assert not report.steady
    assert (report.window, report.retain) == (window + 1, 0)


def test_no_advice_where_keeping_every_ffn_block_is_not_enough() -> None:
    times = Times(0.001, 0.001, 0.0, 0.1, 0.1)
    assert longest_retain(times) is None
    assert advise([4096, 8192] * 8, times) is None


@settings(max_examples=30, deadline=None)
@given(
    st.integers(2, 12),
    st.integers(1, 6),
    st.integers(1, 6),
    st.floats(0.05, 0.98),
    st.floats(0, 0.5),
)
def test_what_is_sufficient_without_a_window_hardly_waits(
    layers: int, pages: int, times_larger: int, busy: float, exchanging: float
) -> None:
    """`busy` is a token's busy time by the time of all loads; `exchanging` is the share of exchanges in it."""
    sizes = [pages << 14, times_larger * pages << 14] * layers
    disk, seconds = 1e9, busy * sum(sizes) / 1e9
    speeds = Speeds(disk, sum(sizes) / (seconds * (1 - exchanging)), seconds * exchanging / len(sizes))
    in_use = place_window(sizes, 1)
    enough = sufficient_ring(in_use, speeds)
    stay = least_resident(sum(sizes), speeds.costs(sizes).busy, disk)
    assert max(stay, in_use.memory_bytes) < enough <= sum(sizes)
    assert stay == pytest.approx((1 - busy) * sum(sizes), abs=1)
    timeline = simulate(place(sizes, enough, speeds).ring, speeds.costs(sizes), 24)
    assert timeline.steady_stall <= 0.02 * timeline.steady_token


def test_a_verdict_names_the_memory_needed_where_no_window_works() -> None:
    sizes = [64 << 12, 128 << 12] * 16
    slow = Times(0.001, 0.001, 0.0, 0.004, 0.008).costs(16)
    report = judge_streaming(place_window(sizes, 2), slow)
    assert report.window is None
    assert report.least_bytes is not None
    least = sum(sizes) * 5 // 6  # a sixth is loaded while a token is busy
    assert least < report.least_bytes < least + sum(sizes) // 8
    assert judge_streaming(place(sizes, sum(sizes)), slow).least_bytes is None
    assert (
        judge_streaming(place_window(sizes, 2), Times(0.010, 0.020, 0.005, 0.020, 0.045).costs(16)).least_bytes is None
    )


HEAD_S = 0.065  # of the head's disk time in a token
SIZES = [64 << 12, 128 << 12] * 16


def with_waits(costs: Costs, beside: OtherWaits) -> Costs:
    """Return the measured `costs` if exchanges contain the waiting of other nodes."""
    exchange = [seconds + beside.others / len(costs.exchange) for seconds in costs.exchange]
    exchange[-1] += beside.own + beside.tail
    return replace(costs, exchange=exchange)


def waits_with(report: SteadyReport, placement: Placement, costs: Costs) -> float:
    """Return the share of a token's time that is waiting, if the advice is followed and no other node waits."""
    if report.window:
        ring = place_window(placement.sizes, report.window, report.retain or 0).ring
    else:
        assert report.least_bytes is not None
        computing = sum(placement.sizes) / sum(costs.compute)
        speeds = Speeds(sum(placement.sizes) / sum(costs.load), computing, costs.exchange[0])
        ring = place(placement.sizes, report.least_bytes, speeds).ring
    timeline = simulate(ring, costs, 40)
    return timeline.steady_stall / timeline.steady_token


some_waits = st.sampled_from([0.0, 0.01, 0.2])
beside_waits = st.builds(OtherWaits, head=some_waits, tail=some_waits, others=some_waits)


milliseconds = st.integers(1, 40).map(lambda ms: ms / 1000)


def loading(attention: float, ffn: float, allreduce: float, load: float) -> Times:
    """Return the load times of blocks on one disk: an FFN block is twice as large as attention, as in `SIZES`."""
    return Times(attention, ffn, allreduce, load, 2 * load)


@settings(max_examples=25, deadline=None)
@given(
    st.builds(loading, milliseconds, milliseconds, milliseconds, milliseconds),
    st.sampled_from([0.0, 0.01, 0.1]),
    beside_waits,
    st.integers(1, 3),
    st.sampled_from([1.0, 1.05]),
)
def test_with_what_is_advised_nothing_waits_any_more(
    times: Times, tail: float, beside: OtherWaits, window: int, slower: float
) -> None:
    """Whatever part of the exchanges was waiting: for the head, between tokens, or for other nodes."""
    costs, placement = replace(times, tail=tail).costs(16), place_window(SIZES, window)
    report = judge_streaming(placement, with_waits(costs, beside), other_waits=beside)
    if not report.steady:
        assert waits_with(report, placement, replace(costs, load=[slower * load for load in costs.load])) <= 0.006


def test_the_heads_disk_time_is_no_time_that_hides_loads() -> None:
    """If it counted as an exchange, the advised setting would wait as soon as the head is in memory."""
    times = Times(0.0003, 0.0005, 0.0, 0.0012, 0.0035)
    beside, placement = OtherWaits(head=HEAD_S), place_window(SIZES, 2)
    measured = with_waits(times.costs(16), beside)
    report = judge_streaming(placement, measured, other_waits=beside)
    assert not report.steady
    assert report.stall_seconds >= HEAD_S
    assert report.times.busy == pytest.approx(times.busy)
    assert waits_with(report, placement, times.costs(16)) <= 0.005


def test_a_node_that_waits_for_its_head_alone_waits() -> None:
    """The advice is the same window, with memory for the head."""
    times = Times(0.01, 0.02, 0.005, 0.001, 0.002)
    beside = OtherWaits(head=HEAD_S)
    report = judge_streaming(place_window(SIZES, 2), with_waits(times.costs(16), beside), other_waits=beside)
    assert not report.steady
    assert report.stall_seconds == pytest.approx(HEAD_S)
    assert report.window is not None
    assert report.window <= 2


def test_embedding_rows_are_in_memory_only_with_everything_else() -> None:
    times = Times(0.01, 0.02, 0.005, 0.001, 0.002)
    beside = OtherWaits(rows=0.05)
    report = judge_streaming(place_window(SIZES, 2), with_waits(times.costs(16), beside), other_waits=beside)
    assert (report.steady, report.window, report.least_bytes) == (False, None, sum(SIZES))


def test_another_nodes_disk_is_neither_a_wait_nor_an_excuse() -> None:
    """The wait for another node hides loads now, but the advice does not rely on it."""
    times = Times(0.001, 0.002, 0.001, 0.004, 0.008)
    beside = OtherWaits(tail=0.05, others=0.3)
    report = judge_streaming(place_window(SIZES, 1), with_waits(times.costs(16), beside), other_waits=beside)
    assert report.times.busy == pytest.approx(times.busy)
    assert report.stall_seconds < 0.05


def test_a_token_that_never_waits_takes_its_busy_time() -> None:
    costs = Costs([1.0, 2.0], [0.5, 0.5], [0.1, 0.1])
    timeline = simulate(ring_of(1, 1), costs, 10)
    assert timeline.steady_token == pytest.approx(costs.busy)


def test_a_waiting_thread_must_be_woken() -> None:
    costs = Costs([1.0, 1.0], [0.0, 0.0], [3.0, 3.0], wake=0.25)
    assert simulate(ring_of(1, 1), costs, 10).typical == pytest.approx((2 * (1.0 + 3.0 + 0.25), 2 * 3.25))
    hidden = Costs([1.0, 1.0], [5.0, 5.0], [3.0, 3.0], wake=0.25)
    assert simulate(ring_of(1, 1), hidden, 10).typical == pytest.approx((12.0, 0.0))


def test_a_load_that_finds_the_disk_idle_takes_longer() -> None:
    costs = Costs([1.0, 1.0], [0.0, 0.0], [3.0, 3.0], start=0.5)
    assert simulate(ring_of(1, 1), costs, 10).typical == pytest.approx((2 * (1.0 + 3.0 + 0.5), 2 * 3.5))
    assert simulate(ring_of(4, 3), costs_of(costs, 4), 10).steady_token == pytest.approx(8 * 3.0, rel=0.02)


def costs_of(costs: Costs, layers: int) -> Costs:
    """Return costs that are the same for every layer."""
    return Costs(list(costs.compute) * layers, list(costs.exchange) * layers, list(costs.load) * layers, 0, costs.start)


def test_slow_loads_stall_where_typical_ones_do_not() -> None:
    """Every other token loads slowly. The median of each block's loads would predict no waiting."""
    fast, slow = (Costs([1.0, 1.0], [2.0, 2.0], [load, load]) for load in (1.5, 4.0))
    assert replay(ring_of(1, 1), [fast, fast], 12).typical[1] == 0
    stalls = replay(ring_of(1, 1), [fast, slow], 12).stalls
    assert sorted(set(stalls[2:])) == pytest.approx([0.0, 4.0])
    placement = place_window([4096, 8192], 1)
    assert judge_streaming(placement, fast).steady
    assert not judge_streaming(placement, fast, [fast, slow, slow]).steady


def test_times_are_those_of_streamed_blocks() -> None:
    """Blocks that were loaded once, at the start, say little about present load times."""
    costs = Costs([1.0, 2.0] * 2, [0.5] * 4, [4.0, 9.0, 6.0, 3.0])
    assert Times.of(costs) == Times(1.0, 2.0, 0.5, 5.0, 6.0)
    assert Times.of(costs, {0, 2, 3}) == Times(1.0, 2.0, 0.5, 5.0, 3.0)
    placement = place_window([4096, 8192] * 2, 1, retain=2)
    report = judge_streaming(placement, Costs([1.0, 1.0] * 2, [0.0] * 4, [1.0, 3.0, 1.0, 100.0]))
    assert report.times.load == 4.0
    assert least_resident(24576, busy=4.0, speed=24576 / 8.0) == 24576 // 2
