"""What a node did when: spans of compute, allreduce, load and stall, written as Chrome trace JSON (opens in Perfetto).

Each node records into its own buffer by its own clock; the master asks for the buffers, estimates each node's clock
offset from the times of an exchange (`clock_offset`), and writes them all on one time axis (`write_chrome`).

Where nothing is recorded, `OFF` stands in: its `span` is one shared object that does nothing.
"""

import json
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

Kind = Literal["compute", "allreduce", "load", "stall"]
Row = tuple[Kind, str, int, int]  # kind, name, begin and end in nanoseconds of the node's clock

_LANES: dict[Kind, int] = {"compute": 0, "allreduce": 0, "stall": 0, "load": 1}  # one queue computes, one loads
_LANE_NAMES = ("compute, allreduce, stall", "load")
_NOTHING = nullcontext()

clock = time.perf_counter_ns


class Off:
    """A trace that records nothing."""

    enabled = False
    rows: Sequence[Row] = ()

    def span(self, kind: Kind, name: str) -> AbstractContextManager[None]:
        """See `Trace.span`."""
        return _NOTHING

    def add(self, kind: Kind, name: str, begin: int, end: int) -> None:
        """See `Trace.add`."""


class Trace(Off):
    """The spans of one node, in memory. Recording is one append, safe from several threads."""

    enabled = True

    def __init__(self, limit: int = 1_000_000) -> None:
        self.rows: list[Row] = []
        self._limit = limit

    def span(self, kind: Kind, name: str) -> AbstractContextManager[None]:
        """Record the time from entering to leaving, also if it is left by an exception."""
        return _Span(self, kind, name)

    def add(self, kind: Kind, name: str, begin: int, end: int) -> None:
        """Record a span with times of `tpi.trace.clock`, in nanoseconds. Beyond `limit` spans, nothing."""
        if len(self.rows) < self._limit:
            self.rows.append((kind, name, begin, end))


OFF = Off()


class _Span:
    __slots__ = ("_begin", "_kind", "_name", "_trace")

    def __init__(self, trace: Trace, kind: Kind, name: str) -> None:
        self._trace, self._kind, self._name = trace, kind, name

    def __enter__(self) -> None:
        self._begin = clock()

    def __exit__(
        self, exception: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._trace.add(self._kind, self._name, self._begin, clock())


@dataclass(frozen=True)
class NodeTrace:
    """One node's spans, and what to add to its clock to get the master's, in nanoseconds."""

    node: str
    rows: Sequence[Row]
    offset: int = 0


def clock_offset(exchanges: Iterable[tuple[int, int, int]]) -> int:
    """What to add to a node's clock to get ours, from (our time when asking, its time, our time when answered).

    The exchange with the shortest round trip is taken, and the node's reading is placed in its middle (as NTP does);
    the error is at most half of that round trip.
    """
    asked, theirs, answered = min(exchanges, key=lambda exchange: exchange[2] - exchange[0])
    return (asked + answered) // 2 - theirs


def write_chrome(path: Path, nodes: Sequence[NodeTrace]) -> None:
    """Write all nodes' spans on the master's clock, starting at zero: one process per node, one thread per queue."""
    starts = [row[2] + node.offset for node in nodes for row in node.rows]
    zero = min(starts, default=0)
    events = [event for pid, node in enumerate(nodes) for event in _events(pid, node, zero)]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _events(pid: int, node: NodeTrace, zero: int) -> Iterable[dict[str, object]]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": node.node}}
    for lane, name in enumerate(_LANE_NAMES):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": lane, "args": {"name": name}}
    for kind, name, begin, end in node.rows:
        at, lasted = (begin + node.offset - zero) / 1000, (end - begin) / 1000  # the format counts in microseconds
        yield {"ph": "X", "cat": kind, "name": name, "pid": pid, "tid": _LANES[kind], "ts": at, "dur": lasted}
