"""The benchmarks of homes: the networks that they request, and how figures follow from turns and traces."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.network.home import paper_homes, specified_links, wheel
from benchmarks.network.home_network import Measured, ratio
from benchmarks.network.home_prefill import HIDDEN, LAYERS, PROMPT, floor, slowest_compute
from tpi.topology.schema import load_topology


def test_homes_have_the_latency_and_bandwidth_asked_for() -> None:
    homes = paper_homes(0.010, 1e9)
    assert homes.latency("device1", "device8") == pytest.approx(0.010)
    assert homes.bandwidth("device1", "device8") == 1e9
    links = specified_links(wheel(3, 0.002, 8e6))
    assert links.between(0, 2).latency_s == pytest.approx(0.002)
    assert links.between(1, 2).bytes_per_s == 1e6


def test_the_floor_of_a_prompt_is_its_bytes_and_latencies() -> None:
    """Over links with latency only, 60 latencies and one for the embeddings.

    Over links without latency, the bytes of a two-shot and of the embeddings.
    """
    far, slow = wheel(4, 0.010, 1e15), wheel(4, 0.0, 8e6)
    assert floor(far) == pytest.approx((2 * LAYERS + 1) * 0.010, rel=1e-3)
    two_shot = 2 * 3 / 4 * 2 * PROMPT * HIDDEN
    assert floor(slow) == pytest.approx((2 * LAYERS * two_shot + 3 * 4 * PROMPT * HIDDEN) / 1e6)
    assert floor(load_topology("lan-10ms-100mb")) > floor(load_topology("lan-10ms-1gb"))


def test_compute_is_that_of_the_slowest_device_in_each_block() -> None:
    def spans(pid: int, *durations: float) -> list[dict[str, Any]]:
        """Return spans of one lane, but of two lanes in the second of three steps, which share its duration."""
        return [
            {"cat": "compute", "pid": pid, "dur": each / lanes, "name": f"block {block}"}
            for lanes, each in zip((1, 2, 1), durations, strict=True)
            for block in range(2 * LAYERS)
            for _ in range(lanes)
        ]

    events: list[dict[str, Any]] = [
        *spans(0, 9.0, 1.0, 7.0),
        {"cat": "allreduce", "pid": 0, "dur": 99.0},
        {"ph": "M"},
        *spans(1, 9.0, 2.0, 7.0),
    ]
    assert slowest_compute(events, before_last=1) == pytest.approx(2 * LAYERS * 2e-6)


def test_a_ratio_compares_quickest_turns() -> None:
    base = Measured(decode=100.0, sync=90.0, prefill=500.0, predicted=None, chosen=("star", "star"))
    runs = {
        "star": [base, replace(base, decode=120.0)],
        "mesh": [replace(base, decode=50.0), replace(base, decode=60.0)],
        "auto": [replace(base, decode=70.0), replace(base, decode=51.0)],
    }
    assert ratio(runs, "auto", ["star", "mesh"], "decode") == pytest.approx(1.02)
