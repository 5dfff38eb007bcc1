"""How a step's tokens become micro-batches, and in which order their tasks are done."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from allreduce.base import Group
from allreduce.flight import IN_FLIGHT
from tpi.kernels.constants import STREAM_TOKENS
from tpi.kernels.spec import Batch
from worker.node.microbatch import Memory, MicroBatch
from worker.node.order import Order

F32 = npt.NDArray[np.float32]
_LEAST = 32  # tokens of a micro-batch at least: shorter products of matrices take longer per token


class Division(Protocol):
    """What the block loop asks at each step."""

    def divide(self, x: F32, batch: Batch) -> tuple[Sequence[MicroBatch], Order]:
        """The micro-batches of a step, and the order of their tasks; `x` is `[tokens, hidden]`."""
        ...

    def joined(self, parts: Sequence[MicroBatch]) -> F32:
        """Hidden states `[tokens, hidden]` of the step's tokens in their order, after the last block."""
        ...

    def alone(self, x: F32, batch: Batch) -> MicroBatch:
        """All of the tokens as one, for a block by itself."""
        ...


class Halves:
    """A step's tokens in order, in halves if that pays: keys of the first are there when the second attends."""

    def __init__(self, group: Group, order: Order) -> None:
        self._group, self._order = group, order
        self._memory: list[Memory] = [{} for _ in range(IN_FLIGHT)]  # what was prepared last, by micro-batch

    def divide(self, x: F32, batch: Batch) -> tuple[Sequence[MicroBatch], Order]:
        """See `Division.divide`."""
        tokens = len(x)
        if tokens < IN_FLIGHT * _LEAST or not self._group.overlaps:
            return [self.alone(x, batch)], self._order
        middle = -(-tokens // (2 * STREAM_TOKENS)) * STREAM_TOKENS
        halves = zip((slice(0, middle), slice(middle, tokens)), self._memory, strict=True)
        return [MicroBatch(x[half], batch.cut(half), memory) for half, memory in halves], self._order

    def joined(self, parts: Sequence[MicroBatch]) -> F32:
        """See `Division.joined`."""
        return parts[0].x if len(parts) == 1 else np.concatenate([part.x for part in parts])

    def alone(self, x: F32, batch: Batch) -> MicroBatch:
        """See `Division.alone`."""
        return MicroBatch(x, batch, self._memory[0])
