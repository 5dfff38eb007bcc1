"""Traces of a node's work, written as Chrome trace JSON (opens in Perfetto).

A trace is a list of spans of compute, allreduce, hop, load and stall. Each node records spans in its own table, by its
own clock. The master requests the tables page by page, estimates each node's clock offset from the times of an exchange
(`clock_offset`), and writes all spans on one time axis (`write_chrome`) as they arrive. So no process has more of a
trace in memory than its own table and one page.

`OFF` is a trace that records nothing: its `span` returns one shared object that does nothing.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from struct import Struct
from threading import Lock
from types import TracebackType
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from tpi.system.private import FILE, private

TransferKind = Literal["weight load", "kv load", "kv save"]
Kind = Literal["compute", "allreduce", "hop", "load", "stall", "accelerator", "attention", TransferKind]
Row = tuple[Kind, str, int, int]  # kind, name, begin and end in nanoseconds of the node's clock
Table = npt.NDArray[np.int64]  # [spans, 4]: kind and name as indices, begin and end
Laps = npt.NDArray[np.int64]  # [spans]: end of each span, in nanoseconds from the beginning of the first
Page = tuple[tuple[str, ...], Table]  # all names so far, and some spans

EMBEDDING, HEAD = "embedding", "head"  # span names of parts that are not blocks; a streamed head has "head tile N"
ON = " on "  # precedes an accelerator's name at the end of a span's name, unless it is the node's first accelerator
TRACE_SPANS = 1 << 17  # capacity of a trace: about a hundred tokens of a large model
TRACE_BYTES = TRACE_SPANS * 4 * 8  # counted in the node's memory budget
PAGE_SPANS = 1 << 13  # most spans in one message

_KINDS: tuple[Kind, ...] = (
    "compute",
    "allreduce",
    "hop",
    "load",
    "stall",
    "accelerator",
    "attention",
    *get_args(TransferKind),
)
_KIND_INDEX = {kind: index for index, kind in enumerate(_KINDS)}
_ROW = Struct("=4q")
_LANE_NAMES = (
    "compute, allreduce, hop, stall", "load", "load of the head", "accelerator", "attention", "weight load", "kv load",
    "kv save",
)  # fmt: skip
_SAVES_AT_ONCE = 3  # the number of transfer threads
_NOTHING = nullcontext()

clock = time.perf_counter_ns


class NoTrace:
    """A trace that records nothing."""

    dropped = 0  # number of spans that did not fit

    @property
    def rows(self) -> Iterator[Row]:
        """Iterator over the spans recorded so far: it yields none."""
        return unroll(self.page)

    def page(self, first: int, count: int = PAGE_SPANS) -> Page:
        """Return at most `count` spans from number `first` on, and all names.

        May be called while other threads record.
        """
        return (), np.empty((0, 4), np.int64)

    def span(self, kind: Kind, name: str) -> AbstractContextManager[None]:
        """Return a context manager that does nothing."""
        return _NOTHING

    def laps(self, kind: Kind, names: Sequence[str]) -> AbstractContextManager[Laps | None]:
        """Return a context manager that does nothing and yields None."""
        return _NOTHING

    def add(self, kind: Kind, name: str, begin: int, end: int) -> None:
        """Do nothing: the span is not recorded."""


class Trace(NoTrace):
    """The spans of one node, in a table of fixed size whose memory is allocated as it fills.

    Safe for several threads.
    """

    def __init__(self, limit: int = TRACE_SPANS) -> None:
        self._table = np.zeros((limit, 4), np.int64)
        self._bytes = self._table.data.cast("B")
        self._count = 0
        self._names: dict[str, int] = {}
        self._lock = Lock()

    def page(self, first: int, count: int = PAGE_SPANS) -> Page:
        """Return at most `count` spans from number `first` on, and all names.

        The spans are a view of the table. Recorded spans never change.
        """
        with self._lock:
            return tuple(self._names), self._table[first : min(first + count, self._count)]

    def span(self, kind: Kind, name: str) -> AbstractContextManager[None]:
        """Record the time from entering to leaving the block, even if an exception leaves it."""
        return _Span(self, kind, name)

    @contextmanager
    def laps(self, kind: Kind, names: Sequence[str]) -> Iterator[Laps | None]:
        """Record one span for each name. Each span begins where the one before ends.

        The block writes the ends to the array that is yielded. If the block ends early, the spans whose ends it has not
        written are not recorded.
        """
        begin = entered = clock()
        laps = np.full(len(names), -1, np.int64)
        try:
            yield laps
        finally:
            for name, lap in zip(names, laps.tolist(), strict=True):
                if lap >= 0:
                    self.add(kind, name, begin, entered + lap)
                    begin = entered + lap

    def add(self, kind: Kind, name: str, begin: int, end: int) -> None:
        """Record a span with times of `tpi.trace.clock`, in nanoseconds. Beyond `limit` spans they are only counted."""
        with self._lock:
            if self._count == len(self._table):
                self.dropped += 1
                return
            number = self._names.setdefault(name, len(self._names))
            _ROW.pack_into(self._bytes, self._count * _ROW.size, _KIND_INDEX[kind], number, begin, end)
            self._count += 1


OFF = NoTrace()


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


def unroll(page: Callable[[int], Page]) -> Iterator[Row]:
    """Yield all spans of a trace whose pages `page(first)` returns. Skip spans of unknown kinds or names."""
    first, more = 0, True
    while more and first < TRACE_SPANS:  # no trace has more, whatever a faulty node sends
        names, table = page(first)
        for kind, name, begin, end in table.tolist():
            if 0 <= kind < len(_KINDS) and 0 <= name < len(names):
                yield _KINDS[kind], names[name], begin, end
        first, more = first + len(table), len(table) == PAGE_SPANS


@dataclass(frozen=True)
class NodeTrace:
    """One node's spans. Adding `offset` nanoseconds to its clock gives the master's."""

    node: str
    rows: Iterable[Row]
    offset: int = 0
    dropped: int = 0  # number of spans that did not fit


def clock_offset(exchanges: Iterable[tuple[int, int, int]]) -> int:
    """Return the nanoseconds to add to another node's clock to get this node's clock.

    Each exchange is (own time when asking, the other node's time, own time when answered). The exchange with the
    shortest round trip is used, and the other node's reading is placed in its middle (as NTP does). The error is at
    most half of that round trip.
    """
    asked, theirs, answered = min(exchanges, key=lambda exchange: exchange[2] - exchange[0])
    return (asked + answered) // 2 - theirs


def write_chrome(path: Path, nodes: Sequence[NodeTrace], zero: int) -> None:
    """Write all nodes' spans on the master's clock from its time `zero` on: one process per node, one thread per lane.

    Raises:
        OSError: if the file cannot be written.
    """
    events = (event for pid, node in enumerate(nodes) for event in _events(pid, node, zero))
    with open(path, "w", opener=private) as file:
        if S_ISREG(os.fstat(file.fileno()).st_mode):
            os.fchmod(file.fileno(), FILE)  # an existing file may have another mode
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        for number, event in enumerate(events):
            file.write((",\n" if number else "\n") + json.dumps(event))
        file.write("\n]}\n")


def _events(pid: int, node: NodeTrace, zero: int) -> Iterator[dict[str, object]]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": node.node}}
    for lane, name in enumerate(_LANE_NAMES):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": lane, "args": {"name": name}}
    lanes = _Lanes()
    for kind, name, begin, end in node.rows:
        at, lasted = (begin + node.offset - zero) / 1000, (end - begin) / 1000  # the format uses microseconds
        lane = lanes.of(kind, name, begin, end)
        yield {"ph": "X", "cat": kind, "name": name, "pid": pid, "tid": lane, "ts": at, "dur": lasted}
    for (name, _), lane in lanes.more.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": lane, "args": {"name": name}}


class _Lanes:
    """Assignment of a node's spans to lanes. Each accelerator after the first has lanes of its own."""

    def __init__(self) -> None:
        self.more: dict[tuple[str, int], int] = {}  # additional lanes, by name and number
        self._saves: dict[str, list[int]] = {}  # by accelerator: time at which each lane of saves is free again

    def of(self, kind: Kind, name: str, begin: int, end: int) -> int:
        """Return the lane of a span: the number of the thread that shows it in the Chrome trace."""
        card, at = name.partition(ON)[2], 0
        if kind == "kv save":
            at = _free_lane(self._saves.setdefault(card, [0] * _SAVES_AT_ONCE), begin, end)
        if not card:
            return _lane(kind, name) + at
        return self.more.setdefault((f"{kind}{ON}{card}", at), len(_LANE_NAMES) + _SAVES_AT_ONCE + len(self.more))


def _lane(kind: Kind, name: str) -> int:
    """Return the lane of a span on the first accelerator or the host. Spans of one lane do not overlap.

    One lane is for computing, one for loading blocks, one for loading the head, and three for moving weights and KV
    pages.
    """
    if kind in _LANE_NAMES[1:]:
        return 2 if kind == "load" and name.startswith(HEAD) else _LANE_NAMES.index(kind)
    return 0


def _free_lane(ends: list[int], begin: int, end: int) -> int:
    """Return the first lane that is free when a save begins, and mark it as used until the save ends.

    Saves may overlap, so they need several lanes.
    """
    lane = next((lane for lane, over in enumerate(ends) if over <= begin), 0)
    ends[lane] = end
    return lane
