"""The block loop: one node's part of the model, the same code on the master (rank 0) and on every worker.

A long step is computed in two lanes, the first and the second half of its tokens: while the sum of one is on its way,
the other computes. Each block is read once for both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter

import numpy as np
import numpy.typing as npt

from allreduce.base import Group
from allreduce.flight import IN_FLIGHT
from scheduler.window import Resident, Window, WindowStats
from tpi.block import Block
from tpi.kernels import Chain, Kernels
from tpi.kernels.constants import STREAM_TOKENS
from tpi.kernels.spec import Batch
from tpi.kv import PagedKV, blocks_for
from tpi.trace import OFF, Off

F32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
_LANE = 32  # tokens of a lane at least: shorter products of matrices take longer per token


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


class _Lane:
    """Some of the tokens of a step on their way through the blocks."""

    def __init__(self, x: F32, batch: Batch) -> None:
        self.x = x
        self.batch = batch
        self.partial: F32 | None = None
        self.awaits: Block | None = None  # whose sum is on its way


class Shard:
    """This node's units of every block, with the window they stream through and the group they are summed in."""

    def __init__(
        self, blocks: Sequence[Block], window: Window, group: Group, kv: PagedKV, kernels: Kernels, trace: Off = OFF
    ) -> None:
        self.blocks = blocks
        self.window = window
        self.group = group
        self.kv = kv
        self.kernels = kernels
        self.trace = trace
        self.clock = StepClock()
        self.streamed = WindowStats()
        self.progress = 0  # blocks computed since the start; heartbeats report it
        self.heard: Callable[[], object] = _nothing  # called after each block, or after all of a short step
        self._chain: Chain | None = None  # of all blocks, opened when first used

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

    def rehearse(self, index: int, tokens: int) -> None:
        """Compute a block for the first `tokens` tokens of no sequence: KV blocks from 0 on are overwritten."""
        block = self.blocks[index]
        x = np.zeros((tokens, block.spec.hidden), np.float32)
        table = np.arange(blocks_for(tokens), dtype=np.int32)[None]
        batch = Batch(np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.int32), table)
        with self.window.hold(index) as data:
            block.partial(self.kernels, data, x, self.kv, batch)
        self.progress += 1

    def _loop(self, x: F32, batch: Batch, step: int) -> F32 | None:
        self.group.begin(step)
        lanes = self._lanes(x, batch)
        for index, block in enumerate(self.blocks):
            self._finish_sum(lanes[0])
            waiting = perf_counter()
            with self.window.hold(index) as data:
                self.clock.stall += perf_counter() - waiting
                self._compute(block, data, lanes[0])
                for before, lane in pairwise(lanes):
                    self._start_sum(block, before)
                    self._finish_sum(lane)
                    self._compute(block, data, lane)
            self._start_sum(block, lanes[-1])
            self.progress += 1
        done = [self._finish_sum(lane) for lane in lanes]
        if not all(done):
            return None
        return lanes[0].x if len(lanes) == 1 else np.concatenate([lane.x for lane in lanes])

    def _lanes(self, x: F32, batch: Batch) -> list[_Lane]:
        """A step's tokens in order, in halves if that pays: keys of the first are there when the second attends."""
        tokens = len(x)
        if tokens < IN_FLIGHT * _LANE or not self.group.overlaps:
            return [_Lane(x, batch)]
        middle = -(-tokens // (2 * STREAM_TOKENS)) * STREAM_TOKENS
        return [_Lane(x[part], batch.cut(part)) for part in (slice(0, middle), slice(middle, tokens))]

    def _compute(self, block: Block, data: Bytes, lane: _Lane) -> None:
        """The partial result of a block, or of one tile of it, which adds to that of the tiles before."""
        with self.trace.span("compute", block.name):
            part = block.partial(self.kernels, data, lane.x, self.kv, lane.batch)
        lane.partial = part if lane.partial is None else np.add(lane.partial, part, out=lane.partial)

    def _start_sum(self, block: Block, lane: _Lane) -> None:
        if not block.complete:
            return
        assert lane.partial is not None
        syncing = perf_counter()
        with self.trace.span("allreduce", block.name):
            self.group.start(lane.partial, everywhere=block is not self.blocks[-1])
        lane.awaits = block
        self.clock.sync += perf_counter() - syncing

    def _finish_sum(self, lane: _Lane) -> bool:
        """Bring a lane's tokens up to the last block that it computed; whether they are there on this node."""
        if lane.awaits is None:
            return True
        syncing = perf_counter()
        with self.trace.span("allreduce", lane.awaits.name):
            total = self.group.finish()
        self.clock.sync += perf_counter() - syncing
        if total is not None:
            lane.x = self.kernels.add_residual(lane.awaits.residual, lane.x, total)
        lane.partial = lane.awaits = None
        self.heard()
        return total is not None

    def _waits_for_nothing(self, x: F32) -> bool:
        """Whether all blocks may run in one call: neither others nor weights are awaited, and nobody follows them.

        A prompt takes long enough for people to follow, and for Python to cost nothing.
        """
        short = len(x) <= STREAM_TOKENS and self.trace is OFF
        return short and self.group.trivial and isinstance(self.window, Resident)

    def _run_chain(self, x: F32, batch: Batch) -> F32:
        if self._chain is None:
            assert isinstance(self.window, Resident)
            pairs = zip(self.blocks, self.window.blocks, strict=True)
            self._chain = self.kernels.open_chain([block.stage(data, self.kv) for block, data in pairs])
        out = self._chain.run(x, batch)
        self.progress += len(self.blocks)
        self.heard()
        return out
