"""Traces: spans, clock offsets, and the file that Perfetto opens."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpi.trace import OFF, NodeTrace, Trace, clock_offset, write_chrome


def test_spans_become_one_timeline_per_node(tmp_path: Path) -> None:
    nodes = [
        NodeTrace("master", [("compute", "block 0", 1000, 3000), ("load", "block 1", 1500, 9000)]),
        NodeTrace("laptop", [("allreduce", "block 0", 501_000, 502_000)], offset=-499_000),
    ]
    write_chrome(tmp_path / "trace.json", nodes)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [(e["pid"], e["tid"], e["cat"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert spans == [
        (0, 0, "compute", "block 0", 0.0, 2.0),
        (0, 1, "load", "block 1", 0.5, 7.5),
        (1, 0, "allreduce", "block 0", 1.0, 1.0),
    ]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["master", "laptop"]


def test_a_span_ends_when_it_is_left_by_an_exception() -> None:
    trace = Trace()
    with pytest.raises(ValueError, match="aborted"), trace.span("stall", "block 3"):
        raise ValueError("aborted")
    ((kind, name, begin, end),) = trace.rows
    assert (kind, name) == ("stall", "block 3")
    assert begin <= end


def test_nothing_is_recorded_when_off_or_full() -> None:
    with OFF.span("compute", "block 0"):
        pass
    OFF.add("load", "block 0", 0, 1)
    assert not OFF.rows
    trace = Trace(limit=2)
    for _ in range(3):
        trace.add("load", "block 0", 0, 1)
    assert len(trace.rows) == 2


@given(
    offset=st.integers(-(10**15), 10**15),
    legs=st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**7)), min_size=1, max_size=8),
)
def test_the_clock_offset_is_right_within_half_the_shortest_round_trip(
    offset: int, legs: list[tuple[int, int]]
) -> None:
    exchanges = [(1000, 1000 + there - offset, 1000 + there + back) for there, back in legs]
    shortest = min(there + back for there, back in legs)
    assert abs(clock_offset(exchanges) - offset) <= shortest / 2 + 1
