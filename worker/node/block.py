"""A block as the block loop knows it: what all its segments have in common."""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.weights import Wanted
from tpi.kernels.spec import Residual
from worker.node.microbatch import MicroBatch


@dataclass(frozen=True)
class Block:
    """The attention or feed-forward half of a layer."""

    number: int  # in order of use
    name: str
    residual: Residual
    joins: bool = False  # it has no sum of its own: what it comes to is added to the next block's

    def wanted(self, parts: Sequence[MicroBatch]) -> Wanted:
        """Which of its units a visit needs: all, since it is dense."""
        return None

    def foretold(self, parts: Sequence[MicroBatch]) -> tuple[int, Wanted] | None:
        """Another block, and which of its units will be wanted; asked when all of this one's weights are there."""
        return None
