"""Comparison of the weights in memory with the hashes in the plan, for `--verify-weights`."""

from collections.abc import Sequence

from tpi.devices.pages import Bytes
from tpi.pack.blockfile import damaged_unit
from worker.plan.segments import NodeSegment
from worker.shards.image import HeldBlock


class Checksums:
    """A `scheduler.window.load.Verify` that compares a segment's bytes with the hashes of its units.

    Args:
        segments: all segments of the window, by number.
        held: the files of the plan's blocks, by `NodeBlock.source`.
    """

    def __init__(self, segments: Sequence[NodeSegment], held: Sequence[HeldBlock]) -> None:
        self._segments = segments
        self._held = held

    def __call__(self, number: int, data: Bytes) -> None:
        """Compare `data`, the bytes of segment `number` in memory, with the hashes of its units.

        Raises:
            WeightsError: if a unit does not match; names the file.
        """
        segment, begin = self._segments[number], 0
        for run in segment.runs:
            wrong = damaged_unit(data[begin : begin + run.nbytes].data, run.hashes)
            if wrong is not None:
                name = f"unit {run.units.first + wrong} of {run.name}"
                raise self._held[segment.block.source].damaged(f"{name} does not match its hash")
            begin += run.nbytes
