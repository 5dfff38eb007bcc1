"""The block loop: one node's part of the model, the same code on the master (rank 0) and on every worker."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import numpy.typing as npt

from allreduce.base import Group
from scheduler.window import Resident, Window, WindowStats
from tpi import kernels
from tpi.block import Block
from tpi.kernels.spec import Batch
from tpi.kv import PagedKV
from tpi.trace import OFF, Off

F32 = npt.NDArray[np.float32]
_SHORT = 16  # tokens of a step that streams weights rather than multiplies matrices


def _nothing() -> None:
    """Nobody listens."""


@dataclass
class StepClock:
    """Where the time of this node's steps went, in seconds, summed since the start."""

    steps: int = 0
    tokens: int = 0
    total: float = 0.0
    sync: float = 0.0  # inside allreduce: transfer, latency, and waiting for slower nodes
    stall: float = 0.0  # waiting for weights

    @property
    def compute(self) -> float:
        """What is left: computing."""
        return self.total - self.sync - self.stall


class Shard:
    """This node's units of every block, with the window they stream through and the group they are summed in."""

    def __init__(self, blocks: Sequence[Block], window: Window, group: Group, kv: PagedKV, trace: Off = OFF) -> None:
        self.blocks = blocks
        self.window = window
        self.group = group
        self.kv = kv
        self.trace = trace
        self.clock = StepClock()
        self.streamed = WindowStats()
        self.progress = 0  # blocks computed since the start; heartbeats report it
        self.heard: Callable[[], object] = _nothing  # called after each block, or after all of a short step
        self._chain: kernels.Chain | None = None  # of all blocks, opened when first used

    @property
    def tiles(self) -> list[int]:
        """How many blocks of the window each half of a layer is."""
        ends = [index for index, block in enumerate(self.blocks, 1) if block.complete]
        return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]

    def forward(self, x: F32, batch: Batch, step: int) -> F32 | None:
        """Run one step through all blocks.

        Args:
            x: `[tokens, hidden]` float32, the embedded tokens; the same on every node.
            batch: where each token stands and where its KV goes.
            step: number of the step, which fences the collective's messages.

        Returns:
            `[tokens, hidden]` after the last block on rank 0, None elsewhere (only the master needs the last sum).
        """
        started = perf_counter()
        out = self._run_chain(x, batch) if self._waits_for_nothing(x) else self._loop(x, batch, step)
        self.clock.steps += 1
        self.clock.tokens += len(batch.positions)
        self.clock.total += perf_counter() - started
        self.streamed += self.window.take()
        return out

    def _loop(self, x: F32, batch: Batch, step: int) -> F32 | None:
        self.group.begin(step)
        total: F32 | None = None
        partial: F32 | None = None
        for index, block in enumerate(self.blocks):
            part = self._compute(index, block, x, batch)
            partial = part if partial is None else np.add(partial, part, out=partial)
            if not block.complete:
                continue
            syncing = perf_counter()
            with self.trace.span("allreduce", block.name):
                last = index == len(self.blocks) - 1
                total = self.group.reduce(partial) if last else self.group.allreduce(partial)
            self.clock.sync += perf_counter() - syncing
            self.heard()
            if total is None:
                break
            x, partial = kernels.add_residual(block.residual, x, total), None
        return None if total is None else x

    def _compute(self, index: int, block: Block, x: F32, batch: Batch) -> F32:
        """The partial result of a block, or of one tile of it."""
        waiting = perf_counter()
        with self.window.hold(index) as data:
            self.clock.stall += perf_counter() - waiting
            with self.trace.span("compute", block.name):
                part = block.partial(data, x, self.kv, batch)
        self.progress += 1
        return part

    def _waits_for_nothing(self, x: F32) -> bool:
        """Whether all blocks may run in one call: neither others nor weights are awaited, and nobody follows them.

        A prompt takes long enough for people to follow, and for Python to cost nothing.
        """
        short = len(x) <= _SHORT and self.trace is OFF
        return short and self.group.trivial and isinstance(self.window, Resident)

    def _run_chain(self, x: F32, batch: Batch) -> F32:
        if self._chain is None:
            assert isinstance(self.window, Resident)
            pairs = zip(self.blocks, self.window.blocks, strict=True)
            self._chain = kernels.open_chain([block.stage(data, self.kv) for block, data in pairs])
        out = self._chain.run(x, batch)
        self.progress += len(self.blocks)
        self.heard()
        return out
