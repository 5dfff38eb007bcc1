"""Layers of any number of blocks: the steady state, the paper's window and budgets use the kinds of blocks."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from scheduler.budget import MemoryNeed, plan_budget
from scheduler.model.placement import place_window
from scheduler.model.ring import Ring
from scheduler.model.steady import Times, advise, is_loose, is_tight, judge_streaming, layer_seconds, longest_retain
from scheduler.model.timeline import Costs, simulate
from tests.support.cluster.cluster_helpers import MadeUpModel
from tpi.devices.pages import PAGE
from tpi.net.messages import NodeOptions, PeerAddress
from tpi.pack.layout import BlockKind
from worker.node_plan import node_plan
from worker.plan.fit import need

MIB = 1 << 20
THREE: tuple[BlockKind, ...] = ("attention", "ffn", "ffn")
ONE: tuple[BlockKind, ...] = ("ffn",)
PEERS = (PeerAddress(0, "master", ""), PeerAddress(1, "laptop", "tcp://192.0.2.1:9991"))

kinds = st.lists(st.sampled_from(["attention", "ffn"]), min_size=1, max_size=5).map(tuple)
seconds = st.integers(0, 40).map(float)
some_times = st.builds(Times, seconds, seconds, seconds, seconds, seconds, kinds)
quick = settings(max_examples=150, deadline=None)


def ring_of(blocks: int, window: int) -> Ring:
    """Return a ring in which everything is streamed and exactly `window` blocks are in memory."""
    return Ring(window, tuple(range(blocks)), (0,) * blocks, (window,) * blocks)


@quick
@given(some_times, st.integers(1, 7), st.integers(2, 4))
def test_time_per_layer_is_the_timelines(times: Times, window: int, layers: int) -> None:
    blocks = layers * len(times.layer)
    assume(window < blocks)
    timeline = simulate(ring_of(blocks, window), times.costs(layers), 60)
    assert timeline.steady_token == pytest.approx(layers * layer_seconds(times, window), rel=0.01, abs=1e-9)


@quick
@given(some_times)
def test_one_extra_block_makes_the_loose_condition_enough(times: Times) -> None:
    assert layer_seconds(times, len(times.layer) + 1) == max(times.busy, times.load)
    if is_tight(times):
        assert is_loose(times)
        assert layer_seconds(times, 2) == times.busy


@pytest.mark.parametrize(
    ("layer", "retain", "kept"),
    [
        (THREE, 1, {1, 2, 4, 5, 7, 8, 10, 11}),
        (THREE, 3, {4, 8}),
        (ONE, 5, {4, 9}),
        (("attention",), 1, set()),
        (("attention", "attention", "attention", "ffn"), 2, {7}),
    ],
)
def test_one_ffn_block_stays_in_every_so_many(layer: tuple[BlockKind, ...], retain: int, kept: set[int]) -> None:
    of_all = layer * (12 // len(layer))
    assert place_window([PAGE] * 12, 2, retain, of_all).resident == kept
    needed = MemoryNeed(blocks=(PAGE,) * 12, page_bytes=1, pages=1, token=1, kinds=of_all)
    assert plan_budget(needed, 1 << 30, window=2, retain=retain).placement.resident == kept


@pytest.mark.parametrize("retain", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("extra", [2.0, 5.0, 9.0, 18.0])
def test_proposition_6_counts_the_ffn_blocks_of_a_layer(retain: int, extra: float) -> None:
    """With a deep ring, one resident block in T of all FFN blocks suffices exactly if the proposition says so."""
    times = Times(3.0, 4.0, 1.0, 2.0, 0.0, THREE)
    times = replace(times, load_ffn=(times.busy + extra - times.load_attention) / 2)
    longest, of_all = longest_retain(times), THREE * 12
    kept = place_window([PAGE] * len(of_all), 1, retain, of_all).resident
    streamed = tuple(block for block in range(len(of_all)) if block not in kept)
    depth = 2 * retain + 4
    ring = Ring(depth, streamed, (0,) * len(streamed), (depth,) * len(streamed))
    timeline = simulate(ring, times.costs(12), 60)
    assert (timeline.steady_stall <= 0.002 * timeline.steady_token) == (longest is not None and retain <= longest)


@pytest.mark.parametrize("layer", [THREE, ONE, ("attention", "ffn", "attention", "ffn", "ffn")])
def test_advice_reaches_the_steady_state(layer: tuple[BlockKind, ...]) -> None:
    times = Times(0.010, 0.020, 0.005, 0.018, 0.031, layer)
    sizes = [(128 if kind == "ffn" else 64) << 12 for kind in layer] * 16
    of_all, costs = layer * 16, times.costs(16)
    assert not is_loose(times)
    advised = advise(sizes, times, kinds=of_all)
    assert advised is not None
    window, retain, memory = advised
    placement = place_window(sizes, window, retain, of_all)
    assert placement.memory_bytes == memory
    report = judge_streaming(placement, costs, kinds=of_all)
    assert report.steady
    assert report.times.busy == pytest.approx(times.busy * len(report.times.layer) / len(layer))
    waiting = judge_streaming(place_window(sizes, 2), costs, kinds=of_all)
    assert not waiting.steady
    assert (waiting.window, waiting.retain) == (advise(sizes, times.with_slower_loads(1.1), kinds=of_all) or ())[:2]


def test_where_layers_differ_all_of_them_are_one() -> None:
    mixed: tuple[BlockKind, ...] = ("attention", "ffn", "ffn", "attention", "ffn")
    times = Times.of(Costs([1.0, 2.0, 4.0, 3.0, 6.0], [0.5] * 5, [1.0, 2.0, 2.0, 1.0, 2.0]), kinds=mixed)
    assert times == Times(2.0, 4.0, 0.5, 1.0, 2.0, mixed)
    assert times.busy == 16.0 + 2.5
    assert times.load == 8.0
    assert Times.of(times.costs(3), kinds=mixed * 3) == times


@pytest.mark.parametrize("pick", [(0, 1, 1), (1,), (0, 1, 0, 1)])
def test_a_plans_blocks_tell_the_budget_their_kinds(pick: tuple[int, ...]) -> None:
    """Layers have those of the two kinds of blocks that `pick` selects."""
    assign = MadeUpModel().split(1, 1, PEERS, cut=8)[1]
    layers = tuple(replace(one, blocks=tuple(one.blocks[at] for at in pick)) for one in assign.layers)
    options = NodeOptions(context=64, pages=2, kv_dtype="f32", prefill_tokens=64, scheduler="window", window=1)
    node = node_plan(replace(assign, layers=layers, options=options))
    wanted = need(node)
    assert wanted.kinds == tuple(("attention", "ffn")[at] for at in pick) * len(layers)
    placement = plan_budget(wanted, 1 << 40, window=1, retain=1).placement
    assert placement.resident >= {number for number, kind in enumerate(wanted.kinds or ()) if kind == "ffn"}
