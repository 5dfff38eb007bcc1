"""A table of chunks: where each piece of a block's experts lies, what stays and what passes through alike.

One kernel call computes all of them (MoE-Lightning, appendix A.1). Pieces are cut where an expert ends, where a chunk
does, and where what stays does; each chunk has a hold of its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType

import numpy as np

from scheduler.weights import Hold
from tpi.devices.pages import Bytes
from tpi.kernels.spec import SHARED
from tpi.partition import by_expert
from worker.node.segment import ExpertsSegment
from worker.pipelines.segments import BatchExperts, ExpertsCall
from worker.plan.node_plan import RunUnits
from worker.plan.segments import NodeSegment

_NOTHING = np.empty(0, np.uint8)


@dataclass(frozen=True)
class TableEntry:
    """Piece number `piece` of a block's experts (or `SHARED`) has the bytes `place` of part number `part`."""

    piece: int
    part: int
    place: slice


def entries(parts: Sequence[NodeSegment], experts: int) -> Iterator[TableEntry]:
    """The table of a block of so many experts, whose units lie in these parts; pieces are numbered in this order."""
    number = 0
    for at, part in enumerate(parts):
        end = 0
        for run in part.runs:
            for units in _cut(run, experts):
                begin, end = end, end + units * run.layout.unit_bytes
                yield TableEntry(SHARED if run.name == "shared" else number, at, slice(begin, end))
                number += run.name != "shared"


def _cut(run: RunUnits, experts: int) -> list[int]:
    """Units of each piece of a run."""
    if run.name == "shared":
        return [len(run.units)] if len(run.units) else []
    return [len(part) for _, part in by_expert(run.units, run.layout.units // experts)]


class ChunkTable:
    """The hold of a block whose parts have holds of their own, in the order of use. See `scheduler.weights.Hold`."""

    def __init__(self, holds: Sequence[Hold], table: Sequence[TableEntry]) -> None:
        """`table` says where pieces are in what is held."""
        self._holds, self._table = holds, table
        self._parts: list[Bytes] = []
        self._within = ExitStack()
        self.held: Mapping[int, Bytes] = {}  # while it is held: the bytes of every piece; replaced, never changed

    def __enter__(self) -> Bytes:
        with ExitStack() as stack:
            parts = [stack.enter_context(hold) for hold in self._holds]  # each waits until it is there
            self._within = stack.pop_all()
        if len(parts) != len(self._parts) or any(map(_differ, parts, self._parts)):
            self._parts = parts
            self.held = {entry.piece: parts[entry.part][entry.place] for entry in self._table}
        return _NOTHING

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._within.close()


def _differ(one: Bytes, other: Bytes) -> bool:
    return one is not other


@dataclass(frozen=True, eq=False)
class TableExperts(BatchExperts):
    """Experts that lie wherever their `table` says, while that is held."""

    table: ChunkTable

    def call(self, data: Bytes) -> ExpertsCall:
        """See `BatchExperts.call`; `data` is nothing."""
        return partial(self.device.kernels.expert_pieces, self.spec, self.table.held)


def gathered(
    segment: ExpertsSegment, parts: Sequence[tuple[NodeSegment, Hold]], experts: int
) -> tuple[TableExperts, ChunkTable]:
    """A block's experts as they lie in `parts`, in this order, and the hold of all of these."""
    table = ChunkTable([hold for _, hold in parts], list(entries([part for part, _ in parts], experts)))
    return TableExperts(segment.device, segment.launch, segment.spec, table), table
