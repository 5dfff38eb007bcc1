"""The division of a step's tokens into micro-batches, and the order of their tasks."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from allreduce.base import Group
from allreduce.flight import IN_FLIGHT
from tpi.kernels.constants import STREAM_TOKENS
from tpi.kernels.spec import Batch
from worker.node.microbatch import Memory, MicroBatch
from worker.node.order import Order, block_by_block

F32 = npt.NDArray[np.float32]
_LEAST = 32  # minimum tokens of a micro-batch: smaller matrix products take longer per token


class Division(Protocol):
    """The protocol by which the block loop divides each step into micro-batches."""

    def divide(self, x: F32, batch: Batch) -> tuple[Sequence[MicroBatch], Order]:
        """Return the micro-batches of a step, and the order of their tasks; `x` is `[tokens, hidden]`."""
        ...

    def joined(self, parts: Sequence[MicroBatch]) -> F32:
        """Return the hidden states `[tokens, hidden]` after the last block, with the tokens in the step's order."""
        ...

    def alone(self, x: F32, batch: Batch) -> MicroBatch:
        """Return one micro-batch of all tokens, to rehearse a single block."""
        ...


class Halves:
    """Division of a long step into two micro-batches: the first and the second half of its tokens.

    A step is divided only if the network can sum one half while the node computes the other. The first half appends its
    keys to the pages before the second half attends.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._memory: list[Memory] = [{} for _ in range(IN_FLIGHT)]  # buffers for prepared inputs, by micro-batch

    def divide(self, x: F32, batch: Batch) -> tuple[Sequence[MicroBatch], Order]:
        """Return the two halves of `x` `[tokens, hidden]`, and the order of their tasks.

        A short step is one micro-batch.
        """
        tokens = len(x)
        if tokens < IN_FLIGHT * _LEAST or not self._group.overlaps:
            return [self.alone(x, batch)], block_by_block
        middle = -(-tokens // (2 * STREAM_TOKENS)) * STREAM_TOKENS
        halves = zip((slice(0, middle), slice(middle, tokens)), self._memory, strict=True)
        return [MicroBatch(x[half], batch.cut(half), memory) for half, memory in halves], block_by_block

    def joined(self, parts: Sequence[MicroBatch]) -> F32:
        """Return the hidden states of both halves as one array, `[tokens, hidden]`."""
        return parts[0].x if len(parts) == 1 else np.concatenate([part.x for part in parts])

    def alone(self, x: F32, batch: Batch) -> MicroBatch:
        """Return one micro-batch of all tokens of `x` `[tokens, hidden]`."""
        return MicroBatch(x, batch, self._memory[0])
