"""The table of a block of experts: the place of each resident or streamed piece of an expert.

With it, one kernel call computes all experts (MoE-Lightning, appendix A.1). A piece ends at the end of an expert, of a
chunk or of the resident part. Each chunk has its own hold.
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
from worker.node_plan import RunUnits
from worker.pipelines.segments import BatchExperts, ExpertsCall
from worker.plan.segments import NodeSegment

_NOTHING = np.empty(0, np.uint8)


@dataclass(frozen=True)
class TableEntry:
    """The place of one piece of a block's experts.

    Attributes:
        piece: the number of the piece, or `SHARED` for the shared experts.
        part: the number of the part of the block that contains the piece.
        place: the byte range of the piece in that part.
    """

    piece: int
    part: int
    place: slice


def entries(parts: Sequence[NodeSegment], experts: int) -> Iterator[TableEntry]:
    """Yield an entry for each piece of a block of experts.

    Args:
        parts: the resident and streamed parts of the block, in order. Pieces are numbered in this order.
        experts: the number of routed experts of the block.
    """
    number = 0
    for at, part in enumerate(parts):
        end = 0
        for run in part.runs:
            for units in _cut(run, experts):
                begin, end = end, end + units * run.layout.unit_bytes
                yield TableEntry(SHARED if run.name == "shared" else number, at, slice(begin, end))
                number += run.name != "shared"


def _cut(run: RunUnits, experts: int) -> list[int]:
    """Return the number of units of each piece of a run: a run of shared experts is one piece.

    A run of routed experts is cut at the end of each expert; `experts` is the number of the model's experts.
    """
    if run.name == "shared":
        return [len(run.units)] if len(run.units) else []
    return [len(part) for _, part in by_expert(run.units, run.layout.units // experts)]


class ChunkTable:
    """A context manager that holds a whole block: it combines the holds of the block's parts."""

    def __init__(self, holds: Sequence[Hold], table: Sequence[TableEntry]) -> None:
        """Create a hold of all parts.

        Args:
            holds: the hold of each part, in the order of use.
            table: the places of the pieces in the parts.
        """
        self._holds, self._table = holds, table
        self._parts: list[Bytes] = []
        self._within = ExitStack()
        self.held: Mapping[int, Bytes] = {}  # the bytes of every piece during a hold; replaced, never changed in place

    def __enter__(self) -> Bytes:
        with ExitStack() as stack:
            parts = [stack.enter_context(hold) for hold in self._holds]  # each waits until its part is loaded
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
    """The experts of a block whose pieces lie in several places; `table` knows the places during a hold."""

    table: ChunkTable

    def call(self, data: Bytes) -> ExpertsCall:
        """Return a call that computes the experts with the weights that the table holds; `data` is not used."""
        return partial(self.device.kernels.expert_pieces, self.spec, self.table.held)


def gathered(
    segment: ExpertsSegment, parts: Sequence[tuple[NodeSegment, Hold]], experts: int
) -> tuple[TableExperts, ChunkTable]:
    """Return a block's experts as one segment over several parts, and one hold for all parts.

    Args:
        segment: the block's experts.
        parts: the parts of the block, in the order of use, with their holds.
        experts: the number of routed experts of the block.
    """
    table = ChunkTable([hold for _, hold in parts], list(entries([part for part, _ in parts], experts)))
    return TableExperts(segment.device, segment.launch, segment.spec, table), table
