"""Some of the tokens of a step on their way through the blocks: their hidden states, and what is under way for them."""

from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

from tpi.devices.base import Device, Finished, Pending, wait_all
from tpi.kernels import Kernels
from tpi.kernels.spec import Batch, BlockSpec, Input, Prepared, Residual, RouterSpec, Routing

F32 = npt.NDArray[np.float32]
Memory = dict[int, Prepared]
"""What was prepared last with each device's kernels, by their `id`: used again from block to block and step to step."""


class MicroBatch:
    """`x` is `[tokens, hidden]`; `batch` says where each token stands and where its keys and values go."""

    def __init__(self, x: F32, batch: Batch, memory: Memory | None = None) -> None:
        self.x = x
        self.batch = batch
        self.between: dict[Hashable, Pending[Any]] = {}  # by segment: what one phase leaves for the next
        self._memory = {} if memory is None else memory
        self._ready: Memory = {}  # of this block
        self._routing: Routing | None = None  # of this block
        self._partial: F32 | None = None
        self._pending: list[Pending[F32]] = []

    def prepared(self, spec: BlockSpec, device: Device, host: Kernels) -> Input:
        """The block's input as this device's kernels take it; normed once, by the host."""
        if device.kernels is host:
            return self._prepare(spec, host, self.x)
        return self._prepare(spec, device.kernels, self._prepare(spec, host, self.x))

    def routed(self, router: RouterSpec, kernels: Kernels, x: Input) -> Routing:
        """The experts of this block that the tokens chose: once, by whoever asks first, so that all agree."""
        if self._routing is None:
            self._routing = kernels.route(router, x)
        return self._routing

    def add(self, partial: Pending[F32]) -> None:
        """Add what one segment comes to. Sums are in the order of adding, whichever is there first."""
        if self._pending or not partial.done:
            self._pending.append(partial)
        else:
            self._sum(partial.wait())

    def partial(self) -> F32:
        """The result of all segments, `[tokens, hidden]`, when every device has it; raises what failed on any."""
        for result in wait_all(self._pending):
            self._sum(result)
        self._pending.clear()
        assert self._partial is not None
        return self._partial

    def join(self) -> None:
        """On to the next block, with the same hidden states: what this one comes to is part of that one's sum."""
        self.partial()
        self._ready.clear()
        self.between.clear()

    def settles(self, residual: Residual) -> bool:
        """Whether it goes on to the next block by itself, where this node's sum is everybody's: see `summed`."""
        return False

    def summed(self, residual: Residual, total: F32 | None, host: Kernels) -> None:
        """The sum over all nodes is there, or is for another node: on to the next block."""
        if total is not None:
            self.x = host.add_residual(residual, self.x, total)
        self._partial = None
        self._ready.clear()
        self._routing = None
        self.between.clear()

    def abandon(self) -> None:
        """Wait for all that is under way, whatever comes of it: nothing is computed any more with what it reads."""
        for pending in [*self._pending, *self.between.values()]:
            Finished(pending.wait)

    def _prepare(self, spec: BlockSpec, kernels: Kernels, x: Input) -> Prepared:
        key = id(kernels)
        if key not in self._ready:
            self._ready[key] = self._memory[key] = kernels.prepare(spec, x, into=self._memory.get(key))
        return self._ready[key]

    def _sum(self, result: F32) -> None:
        self._partial = result if self._partial is None else np.add(self._partial, result, out=self._partial)
