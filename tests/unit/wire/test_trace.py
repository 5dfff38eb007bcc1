"""Traces: spans, clock offsets, and the file that Perfetto opens."""

import json
import threading
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpi.trace import OFF, PAGE_SPANS, TRACE_BYTES, Laps, NodeTrace, Trace, clock, clock_offset, write_chrome


def test_spans_become_one_timeline_per_node(tmp_path: Path) -> None:
    nodes = [
        NodeTrace("master", [("compute", "block 0", 1000, 3000), ("load", "block 1", 1500, 9000)]),
        NodeTrace("laptop", [("allreduce", "block 0", 501_000, 502_000)], offset=-499_000),
        NodeTrace("idle", []),
    ]
    write_chrome(tmp_path / "trace.json", nodes, zero=500)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [(e["pid"], e["tid"], e["cat"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert spans == [
        (0, 0, "compute", "block 0", 0.5, 2.0),
        (0, 1, "load", "block 1", 1.0, 7.5),
        (1, 0, "allreduce", "block 0", 1.5, 1.0),
    ]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["master", "laptop", "idle"]


def test_what_may_load_at_once_is_on_lanes_of_its_own(tmp_path: Path) -> None:
    spans = NodeTrace(
        "master", [("load", "block 1", 0, 9), ("load", "head tile 1", 5, 12), ("stall", "head tile 1", 9, 12)]
    )
    write_chrome(tmp_path / "trace.json", [spans], zero=0)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["tid"] for e in events if e["ph"] == "X"] == [1, 2, 0]


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
    assert list(OFF.rows) == []
    trace = Trace(limit=2)
    for _ in range(5):
        trace.add("load", "block 0", 0, 1)
    assert len(list(trace.rows)) == 2
    assert trace.dropped == 3


def test_laps_are_successive_spans_even_of_a_call_cut_short() -> None:
    def aborted(laps: Laps | None) -> None:
        assert laps is not None
        laps[:2] = 10, 30
        raise ValueError("aborted")

    trace, before = Trace(), clock()
    with pytest.raises(ValueError, match="aborted"), trace.laps("compute", ["a", "b", "c"]) as laps:
        aborted(laps)
    (*first, begin, end), second = trace.rows
    assert before <= begin <= clock()
    assert [first, end - begin] == [["compute", "a"], 10]
    assert second == ("compute", "b", end, end + 20)
    with OFF.laps("compute", ["a"]) as nothing:
        assert nothing is None


def test_a_full_trace_takes_what_the_budget_counts_for_it() -> None:
    names = [f"block {block}" for block in range(400)]
    tracemalloc.start()
    try:
        trace = Trace()
        number = 0
        while not trace.dropped:
            trace.add("compute", "".join(names[number % 400]), number, number + 1)
            number += 1
        assert tracemalloc.get_traced_memory()[1] < TRACE_BYTES + (100 << 10)
    finally:
        tracemalloc.stop()
    assert TRACE_BYTES <= 4 << 20


def test_a_trace_is_read_page_by_page() -> None:
    trace = Trace()
    for number in range(2 * PAGE_SPANS):
        trace.add("stall", f"block {number % 3}", number, number + 1)
    names, table = trace.page(PAGE_SPANS, 2)
    assert table.tolist() == [[4, (PAGE_SPANS + n) % 3, PAGE_SPANS + n, PAGE_SPANS + n + 1] for n in range(2)]
    assert names == ("block 0", "block 1", "block 2")
    assert [row[2] for row in trace.rows] == list(range(2 * PAGE_SPANS))
    assert trace.page(3 * PAGE_SPANS)[1].shape == (0, 4)


def test_several_threads_record_at_once() -> None:
    trace, each = Trace(limit=3000), 1000

    def record(name: str) -> None:
        for number in range(each):
            trace.add("load", f"{name} {number % 7}", number, number + 1)

    threads = [threading.Thread(target=record, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = list(trace.rows)
    assert len(rows) + trace.dropped == 4 * each
    assert all(name[2:] == str(begin % 7) for _, name, begin, _ in rows)
    for one in "abcd":
        begins = [begin for _, name, begin, _ in rows if name[0] == one]
        assert all(first < second for first, second in pairwise(begins))


@given(
    offset=st.integers(-(10**15), 10**15),
    legs=st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**7)), min_size=1, max_size=8),
)
def test_the_clock_offset_is_right_to_half_the_shortest_trip(offset: int, legs: list[tuple[int, int]]) -> None:
    exchanges = [(1000, 1000 + there - offset, 1000 + there + back) for there, back in legs]
    shortest = min(there + back for there, back in legs)
    assert abs(clock_offset(exchanges) - offset) <= shortest / 2 + 1
