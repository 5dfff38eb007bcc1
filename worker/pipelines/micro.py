"""A micro-batch whose hidden states are followed by the accelerator: nobody waits for it between two blocks."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tpi.devices.base import Device, Finished, Pending, wait_all
from tpi.kernels import Kernels
from tpi.kernels.spec import Batch, BlockSpec, Input, Residual
from worker.node.microbatch import MicroBatch
from worker.pipelines.lanes import BatchLanes

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


class LiftedMicroBatch(MicroBatch):
    """Norms and sums of one node are calls of its accelerator, in the order of asking; so are, or are the host's beside
    it, residual connections.

    What several nodes sum is waited for, since it travels; what comes of that is a call again. Its `x` is what those
    who add have come to; others read it after `arrive`.
    """

    def __init__(self, number: int, x: F32, batch: Batch, rows: I64, lanes: BatchLanes, attended_there: bool) -> None:
        """`rows` are the step's tokens that it has; `attended_there` says where: on the accelerator, or the host."""
        super().__init__(x, batch)
        self.number, self.rows, self.attended_there = number, rows, attended_there
        self._lanes = lanes
        self._moves: list[Pending[None]] = []  # from block to block, since the step began

    def prepared(self, spec: BlockSpec, device: Device, host: Kernels) -> Input:
        """See `MicroBatch.prepared`; by the accelerator, in a call of it behind `follow`."""
        return self._prepare(spec, device.kernels, self.x)

    def follow(self) -> None:
        """Have the accelerator make no further call before hidden states are those of the block that comes next."""
        if self._moves and not self._lanes.adds_there and not self._moves[-1].done:
            self._lanes.device.start(self._moves[-1].wait)

    def add(self, partial: Pending[F32]) -> None:
        """See `MicroBatch.add`."""
        self._pending.append(partial)

    def partial(self) -> F32:
        """See `MicroBatch.partial`; also raises what failed since the block before: a worker never asks for more."""
        wait_all(self._moves)
        self._moves.clear()
        return super().partial()

    def join(self) -> None:
        """See `MicroBatch.join`; behind what the accelerator has yet to prepare for this block, whoever adds."""
        self._moves.append(self._lanes.device.start(self._forget))

    def settles(self, residual: Residual) -> bool:
        """See `MicroBatch.settles`: the sum of one node's segments is the block's."""
        pending, self._pending = self._pending, []

        def settle(kernels: Kernels) -> None:
            results = [each.wait() for each in pending]
            total = results[0]
            for result in results[1:]:
                total = np.add(total, result)
            self.x = kernels.add_residual(residual, self.x, total)
            self._forget()

        self._later(settle)
        return True

    def summed(self, residual: Residual, total: F32 | None, host: Kernels) -> None:
        """See `MicroBatch.summed`."""
        self._partial = None
        own = None if total is None else total.copy()  # the next sum takes its place before this is read

        def settle(kernels: Kernels) -> None:
            if own is not None:
                self.x = kernels.add_residual(residual, self.x, own)
            self._forget()

        self._later(settle)

    def arrive(self) -> F32:
        """Wait for the last block; `[tokens, hidden]`. Raises what failed on the way."""
        wait_all(self._moves)
        return self.x

    def abandon(self) -> None:
        """See `MicroBatch.abandon`."""
        super().abandon()
        for move in self._moves:
            Finished(move.wait)

    def _later(self, call: Callable[[Kernels], None]) -> None:
        self._moves.append(self._lanes.add(call))

    def _forget(self, kernels: Kernels | None = None) -> None:
        """What was made for a block is of no use to the next."""
        self._ready.clear()
        self._routing = None
