"""A micro-batch whose blocks the accelerator computes one after the other, without the host waiting in between."""

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


class QueuedMicroBatch(MicroBatch):
    """A micro-batch that queues its work instead of waiting for it.

    Norms are queued on the accelerator. Residual connections, with the sum of a block's segments, are queued on the
    accelerator or on a thread of the host. If several nodes compute the model, the partial result is waited for before
    it is sent to them. `x` changes while queued calls run, so other threads must read it only after `arrive`.
    """

    def __init__(self, number: int, x: F32, batch: Batch, rows: I64, lanes: BatchLanes, attended_there: bool) -> None:
        """Create a micro-batch.

        Args:
            number: its number in the step, from 0.
            x: its hidden states, `[tokens, hidden]`.
            batch: the positions and pages of its tokens.
            rows: the indices of its tokens in the step.
            lanes: the host's threads and the accelerator.
            attended_there: True if the accelerator computes attention, False if the host does.
        """
        super().__init__(x, batch)
        self.number, self.rows, self.attends_on_accelerator = number, rows, attended_there
        self._lanes = lanes
        self._moves: list[Pending[None]] = []  # queued steps from one block to the next

    def prepared(self, spec: BlockSpec, device: Device, host: Kernels) -> Input:
        """Prepare the block's input on the accelerator and return it. Call `follow` first."""
        return self._prepare(spec, device.kernels, self.x)

    def follow(self) -> None:
        """Make later calls on the accelerator wait for the residual connection of the block before."""
        if self._moves and not self._lanes.adds_there and not self._moves[-1].done:
            self._lanes.device.start(self._moves[-1].wait)

    def add(self, partial: Pending[F32]) -> None:
        """Add the pending partial result of one segment, without waiting for it."""
        self._pending.append(partial)

    def partial(self) -> F32:
        """Wait for the partial results of all segments and return their sum, `[tokens, hidden]`.

        Errors of earlier queued calls are raised too, since a worker waits for these calls only here.
        """
        wait_all(self._moves)
        self._moves.clear()
        return super().partial()

    def join(self, stacked: bool = False) -> None:
        """Go on to the next block, which has the same input as this one and shares its sum.

        Once the accelerator has run its queued calls for this block, the prepared input is discarded. `stacked` must be
        False.
        """
        assert not stacked  # no such model runs in micro-batches (`ModelConfig.host_only`)
        self._moves.append(self._lanes.device.start(self._discard))

    def finish_alone(self, residual: Residual) -> bool:
        """Queue the sum of the segments and the residual connection; return True, as no other node adds to the sum."""
        pending, self._pending = self._pending, []

        def settle(kernels: Kernels) -> None:
            results = [each.wait() for each in pending]
            total = results[0]
            for result in results[1:]:
                total = np.add(total, result)
            self.x = kernels.add_residual(residual, self.x, total)
            self._discard()

        self._later(settle)
        return True

    def summed(self, residual: Residual, total: F32 | None, host: Kernels) -> None:
        """Queue the residual connection with `total`, the sum over all nodes.

        `total` is None if this node does not get the sum.
        """
        self._partial = None
        own = None if total is None else total.copy()  # the next sum overwrites `total` before this call runs

        def settle(kernels: Kernels) -> None:
            if own is not None:
                self.x = kernels.add_residual(residual, self.x, own)
            self._discard()

        self._later(settle)

    def arrive(self) -> F32:
        """Wait for all queued calls; return the hidden states, `[tokens, hidden]`, or raise the first error."""
        wait_all(self._moves)
        return self.x

    def abandon(self) -> None:
        """Wait for all queued calls, and ignore their errors."""
        super().abandon()
        for move in self._moves:
            Finished(move.wait)

    def _later(self, call: Callable[[Kernels], None]) -> None:
        self._moves.append(self._lanes.add(call))

    def _discard(self, kernels: Kernels | None = None) -> None:
        self._ready.clear()
        self._routing = None
