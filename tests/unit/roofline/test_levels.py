"""Roofs of a hierarchy of memories, and their crossings: equations 4 to 11, on machines of the paper."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.model.machine import NodeMachine, emulated_node
from scheduler.model.roofline.levels import Hierarchy, Level
from tpi.devices.emulated.machine import parse_emulated

L4 = Hierarchy.of(emulated_node(parse_emulated("l4")))
speeds = st.floats(1, 1e4)


def test_the_levels_of_a_node() -> None:
    assert [level.name for level in L4.levels] == ["emu", "RAM", "disk"]
    assert L4.between(0, 1) == 25e9
    assert L4.between(0, 2) == L4.between(1, 2) == 1.2e9  # the slowest link on the way
    alone = emulated_node(parse_emulated("l4"))
    host = NodeMachine(alone.host, alone.memory, alone.disk)
    assert [level.name for level in Hierarchy.of(host).levels] == ["RAM", "disk"]


def test_attention_of_grouped_queries_stays_on_the_cpu() -> None:
    """Figure 4: with keys and values of 16 or 4 bits, the intensity is left of P1."""
    points = L4.turning_points(0, 4.0, 1)
    assert points.move == pytest.approx(1.6e12 / 25e9)
    for intensity in (4.0, 16.0):
        assert intensity < points.move
        assert L4.local(1, intensity) > L4.across(0, intensity, 1, intensity)


def test_neurons_are_worth_moving_for_large_batches_only() -> None:
    """Figure 5: an expert of Mixtral in 16 bits, 2 of 8 experts a token: an intensity of 1/4 for each token."""
    own = 128 / 4  # of a micro-batch
    points = L4.turning_points(0, own, 1)
    assert points.move / 0.25 == pytest.approx(256)  # tokens
    assert points.arrive == pytest.approx(300e9 * own / 25e9)
    assert points.arrive == points.balance  # the accelerator is bound by its memory there
    assert L4.across(0, own, 1, points.arrive) == pytest.approx(L4.local(0, own))
    assert L4.across(0, own, 1, 0.9 * points.arrive) < L4.local(0, own)


@given(speeds, speeds, speeds, speeds, speeds, st.floats(0.01, 100))
def test_turning_points_are_where_the_other_roof_decides(
    fast: float, slow: float, link: float, upper: float, lower: float, own: float
) -> None:
    hierarchy = Hierarchy((Level("upper", 1, fast, upper), Level("lower", 1, slow, lower)), (link,))
    points = hierarchy.turning_points(0, own, 1)
    for share in (0.5, 0.99):
        left = share * points.move
        if left:  # moving is no use left of P1
            assert hierarchy.across(0, own, 1, left) <= hierarchy.local(1, left) * (1 + 1e-9)
        assert hierarchy.across(0, own, 1, share * points.arrive) == pytest.approx(link * share * points.arrive)
    assert hierarchy.across(0, own, 1, 2 * points.arrive) == pytest.approx(hierarchy.local(0, own))
