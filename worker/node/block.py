"""The properties of a block that the block loop needs and that all segments of the block share."""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.weights import Wanted
from tpi.block import Joining
from tpi.kernels.spec import Residual
from worker.node.microbatch import MicroBatch


@dataclass(frozen=True)
class Block:
    """The attention or feed-forward half of a layer."""

    number: int  # in order of use
    name: str
    residual: Residual
    sums_with_next: Joining = ""  # how its partial result joins that of the next block, if one sum serves both

    def wanted(self, parts: Sequence[MicroBatch]) -> Wanted:
        """Return the units that the micro-batches `parts` need. None means all units, since the block is dense."""
        return None

    def predicted_units(self, parts: Sequence[MicroBatch]) -> tuple[int, Wanted] | None:
        """Return the number of a later block and the units that it will probably need, so that they are prefetched.

        Return None if no units are predicted. The block loop calls this when all weights of this block are in memory.
        """
        return None
