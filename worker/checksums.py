"""Are the weights in memory those of the plan? The hashes of what each block or tile of a window holds."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scheduler.memory import Bytes
from tpi.messages import DIGEST_BYTES, Assign, RunPlan
from tpi.pack.blockfile import damaged_unit
from tpi.pack.layout import RunName
from tpi.partition import Range
from worker.image import HeldBlock


class Checksums:
    """A `scheduler.load.Verify` for the extents of `worker.tiles.extents_of`, given the same arguments."""

    def __init__(self, assign: Assign, held: Sequence[HeldBlock], tiles: Sequence[Sequence[Range]]) -> None:
        self._blocks = list(_blocks(assign, held, tiles))

    def __call__(self, block: int, data: Bytes) -> None:
        """Compare the bytes of a block or tile with their hashes.

        Raises:
            WeightsError: if a unit does not match; names the file.
        """
        source, runs = self._blocks[block]
        begin = 0
        for run in runs:
            wrong = damaged_unit(data[begin : begin + run.nbytes].data, run.hashes)
            if wrong is not None:
                raise source.damaged(f"unit {run.first + wrong} of {run.name} does not match its hash")
            begin += run.nbytes


@dataclass(frozen=True)
class _Units:
    """Units of a run from `first` on, back to back."""

    name: RunName
    first: int
    nbytes: int
    hashes: bytes


def _blocks(
    assign: Assign, held: Sequence[HeldBlock], tiles: Sequence[Sequence[Range]]
) -> Iterator[tuple[HeldBlock, list[_Units]]]:
    for layer, parts in zip(assign.layers, tiles, strict=True):
        attention = assign.blocks[layer.attention].runs
        yield held[layer.attention], [_units(assign, run, Range(run.first, run.last)) for run in attention]
        (neurons,) = assign.blocks[layer.ffn].runs
        for part in parts:
            yield held[layer.ffn], [_units(assign, neurons, part)]


def _units(assign: Assign, run: RunPlan, part: Range) -> _Units:
    layout = assign.layouts[run.layout]
    hashes = run.hashes[(part.first - run.first) * DIGEST_BYTES : (part.last - run.first) * DIGEST_BYTES]
    return _Units(layout.name, part.first, len(part) * layout.unit_bytes, hashes)
