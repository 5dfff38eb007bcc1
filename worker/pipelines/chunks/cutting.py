"""How a layer's weights are cut for batches: what stays of a block of experts, and in which chunks the rest passes.

MoE-Lightning's weights paging (appendix A.1): a layer passes in as many chunks as there are micro-batches. Chunks are
cut at units, wherever experts begin and end. What passes of attention or of dense neurons is one piece, since their
kernels take it as it lies in one place; only its copies go by the size of a chunk.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tpi.partition import Range
from worker.plan.node_plan import NodeBlock, RunUnits

Runs = tuple[RunUnits, ...]
_LEAST = 1 << 16  # bytes of a chunk: less takes the link no longer than to begin


@dataclass(frozen=True)
class Chunking:
    """A layer in `count` chunks, or in fewer of `least` bytes each."""

    count: int
    least: int = _LEAST

    def size(self, passing: int) -> int:
        """Bytes of a chunk where so many pass through of a layer."""
        return max(self.least, -(-passing // self.count))


def kept_experts(block: NodeBlock, room: float) -> tuple[Runs, Runs]:
    """What of a block of experts fits into `room` bytes, and the rest, which is contiguous.

    Units are kept from the first on; or, where shared experts do not fit, which are never cut, the last ones.
    """
    shared, routed = _sorted(block.runs)
    beside = sum(run.nbytes for run in shared)
    units, each = sum(len(run.units) for run in routed), routed[0].layout.unit_bytes
    fits = beside <= room
    count = min(units, max(0, int((room - beside * fits) // each)))
    if fits:
        return (*shared, *_between(routed, 0, count)), _between(routed, count, units)
    return _between(routed, units - count, units), (*shared, *_between(routed, 0, units - count))


def in_chunks(runs: Sequence[RunUnits], size: int) -> Iterator[Runs]:
    """Units of experts that pass through, in even chunks of about `size` bytes; shared experts by themselves."""
    shared, routed = _sorted(runs)
    if shared:
        yield shared
    units = sum(len(run.units) for run in routed)
    count = min(units, max(1, round(sum(run.nbytes for run in routed) / size)))
    for first, last in pairwise(units * at // max(1, count) for at in range(count + 1)):
        yield _between(routed, first, last)


def _sorted(runs: Sequence[RunUnits]) -> tuple[Runs, Runs]:
    """Units of shared experts, and of routed ones; without runs that are empty where others are not."""
    shared, routed = (tuple(run for run in runs if (run.name == "shared") == beside) for beside in (True, False))
    return tuple(run for run in shared if len(run.units)), routed


def _between(runs: Sequence[RunUnits], first: int, last: int) -> Runs:
    """The units number `first` to `last` of runs that lie back to back."""
    found, begin = list[RunUnits](), 0
    for run in runs:
        end = begin + len(run.units)
        if max(first, begin) < min(last, end):
            at = run.units.first - begin
            found.append(run.cut(Range(at + max(first, begin), at + min(last, end))))
        begin = end
    return tuple(found)
