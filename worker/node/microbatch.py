"""The state of a micro-batch (some tokens of a step) on its way through the blocks."""

from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

from tpi.devices.base import Device, Finished, Pending, wait_all
from tpi.kernels import Kernels
from tpi.kernels.perlayer import add_per_layer
from tpi.kernels.spec import Batch, BlockSpec, Input, Prepared, Residual, RouterSpec, Routing

F32 = npt.NDArray[np.float32]
Memory = dict[int, Prepared]
"""Buffers for prepared inputs, by the `id` of a device's kernels; reused from block to block and step to step."""


class MicroBatch:
    """Hidden states of some tokens of a step, and their unfinished computations in the current block."""

    def __init__(self, x: F32, batch: Batch, memory: Memory | None = None) -> None:
        """Create a micro-batch before its first block.

        Args:
            x: hidden states `[tokens, hidden]`, float32.
            batch: the position of each token in its sequence, and the pages for its keys and values.
            memory: buffers of an earlier micro-batch to reuse.
        """
        self.x = x
        self.batch = batch
        self.phase_results: dict[Hashable, Pending[Any]] = {}  # by segment: the result of its last phase, for the next
        self._memory = {} if memory is None else memory
        self._ready: Memory = {}  # prepared inputs of the current block
        self._routing: Routing | None = None  # of the current block
        self._partial: F32 | None = None
        self._before: F32 | None = None  # rows of the block before, which shares its sum with the current one
        self._pending: list[Pending[F32]] = []

    def prepared(self, spec: BlockSpec, device: Device, host: Kernels) -> Input:
        """Return the block's input in the form that the kernels of `device` take.

        The host's kernels, `host`, apply the norm, once for all devices.
        """
        if device.kernels is host:
            return self._prepare(spec, host, self.x)
        return self._prepare(spec, device.kernels, self._prepare(spec, host, self.x))

    def routed(self, router: RouterSpec, kernels: Kernels, x: Input) -> Routing:
        """Return the experts that the tokens chose in this block.

        The first call computes them, so that all segments use the same choice.
        """
        if self._routing is None:
            self._routing = kernels.route(router, x)
        return self._routing

    def add(self, partial: Pending[F32]) -> None:
        """Add the result of one segment. Results are summed in the order of the calls, whichever is ready first."""
        if self._pending or not partial.done:
            self._pending.append(partial)
        else:
            self._sum(partial.wait())

    def partial(self) -> F32:
        """Wait for all segments, and return the sum of their results, `[tokens, hidden]`.

        If the block before left its partial result to be summed together with this one (`join` with `stacked`), its
        rows come first. If the computation of a segment failed, its error is raised.
        """
        for result in wait_all(self._pending):
            self._sum(result)
        self._pending.clear()
        assert self._partial is not None
        if self._before is not None:
            self._before, self._partial = None, np.concatenate([self._before, self._partial])
        return self._partial

    def join(self, stacked: bool = False) -> None:
        """Go on to the next block, which has the same input as this one and shares its sum over all nodes.

        This block's partial result is kept. The next block's is added to it or, if `stacked`, appended as further rows.
        """
        partial = self.partial()
        if stacked:
            self._before, self._partial = partial, None
        self._ready.clear()
        self.phase_results.clear()

    def finish_alone(self, residual: Residual) -> bool:
        """Return False: the block loop must sum the partial result, and call `summed`.

        Called only if this node is the whole group. A subclass may do the work of `summed` instead, and return True.
        """
        return False

    def summed(self, residual: Residual, total: F32 | None, host: Kernels) -> None:
        """Add the sum over all nodes to the hidden states, and go on to the next block.

        `total` is `[tokens, hidden]`, or None if this node does not get the sum.
        """
        if total is not None:
            self.x = host.add_residual(residual, self.x, total)
            if residual.per_layer is not None:
                self.x = add_per_layer(host, residual.per_layer, self.x, self.batch.per_layer)
        self._partial = None
        self._ready.clear()
        self._routing = None
        self.phase_results.clear()

    def abandon(self) -> None:
        """Wait for all computations under way and ignore their errors, so that their memory can be reused."""
        for pending in [*self._pending, *self.phase_results.values()]:
            Finished(pending.wait)

    def _prepare(self, spec: BlockSpec, kernels: Kernels, x: Input) -> Prepared:
        key = id(kernels)
        if key not in self._ready:
            self._ready[key] = self._memory[key] = kernels.prepare(spec, x, into=self._memory.get(key))
        return self._ready[key]

    def _sum(self, result: F32) -> None:
        self._partial = result if self._partial is None else np.add(self._partial, result, out=self._partial)
