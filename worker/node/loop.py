"""The block loop: one node's part of the model, the same code on the master (rank 0) and on every worker.

A step's order is data (`worker.node.order`): any that keeps each micro-batch's own is run here. In the plain one a long
step passes in two micro-batches, the first and the second half of its tokens: while the sum of one travels, the other
computes, and each block is held once for both.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import numpy.typing as npt

from allreduce.base import Group
from allreduce.flight import IN_FLIGHT
from scheduler.weights import Weights
from tpi.kernels import Chain, Kernels
from tpi.kernels.constants import STREAM_TOKENS
from tpi.kernels.spec import Batch, ExpertsSpec, Input
from tpi.trace import OFF, NoTrace
from worker.node.block import Block
from worker.node.division import Division, Halves
from worker.node.microbatch import MicroBatch
from worker.node.order import COMPUTE, Order, Phase, Visit, plain, visits
from worker.node.segment import AttentionSegment, Phases, Segment

F32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Sum = Callable[[F32], F32]
Check = Callable[[F32, str], None]  # with a partial result and the name of its block; may raise

_AFTER_HEADS = frozenset({Phase.ATTEND, Phase.OUTPUT})


def _as_it_is(values: F32) -> F32:
    """A sum of one."""
    return values


def _nothing() -> None:
    """Nobody listens."""


def unchecked(partial: F32, name: str) -> None:
    """Any result will do."""


@dataclass
class StepClock:
    """Where the time of this node's steps went, in seconds, summed since the start."""

    steps: int = 0
    tokens: int = 0
    total: float = 0.0
    sync: float = 0.0  # inside allreduce: transfer, latency, and waiting for slower nodes


class BlockLoop:
    """Runs steps through all blocks, with the weights they hold and the group that they are summed in."""

    def __init__(
        self,
        blocks: Sequence[Block],
        weights: Weights[Segment],
        group: Group,
        kernels: Kernels,
        trace: NoTrace = OFF,
        order: Order = plain,
        check: Check = unchecked,
        division: Division | None = None,
    ) -> None:
        """`kernels` are the host's, which adds residuals; `check` sees this node's part of every sum.

        `division` says what a step is divided into, and the order then, in place of halves and `order`.
        """
        self.blocks = blocks
        self.weights = weights
        self.group = group
        self.trace = trace
        self.clock = StepClock()
        self.progress = 0  # blocks computed since the start; heartbeats report it
        self.on_block: Callable[[], object] = _nothing  # called after each block, or after all of a short step
        self._kernels = kernels
        self._order, self._check = order, check
        self._division: Division = division or Halves(group, order)
        self._flying = deque[tuple[MicroBatch, Block]]()  # whose sums are on their way, the oldest first
        self._chain: Chain | None = None  # of all blocks, opened when first used
        self._names = [block.name for block in blocks]

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
        self.weights.begin(len(x))
        out = self._run_chain(x, batch) if self._waits_for_nothing(x) else self._run(x, batch, step)
        self.clock.steps += 1
        self.clock.tokens += len(batch.positions)
        self.clock.total += perf_counter() - started
        return out

    def rehearse(self, index: int, x: F32, batch: Batch) -> None:
        """Compute a block and do nothing with the result; what `batch` names of the pages is overwritten."""
        part = self._division.alone(x, batch)
        with self.weights.hold(index) as segments:
            for segment, data in segments:
                self._start(segment, COMPUTE, data, part, _as_it_is)
        part.partial()
        self.progress += 1

    def _run(self, x: F32, batch: Batch, step: int) -> F32 | None:
        self.group.begin(step)
        self._flying.clear()
        parts, order = self._division.divide(x, batch)
        try:
            for visit in visits(order, len(self.blocks), len(parts)):
                self._visit(visit, parts)
            here = True
            while self._flying:
                here = self._finish_sum()
            return self._division.joined(parts) if here else None
        except BaseException:
            for part in parts:
                part.abandon()
            self.weights.abandon()
            raise

    def _visit(self, visit: Visit, parts: Sequence[MicroBatch]) -> None:
        block = self.blocks[visit.block]
        self._finish_sums(parts[(visit.jobs or visit.sums)[0].micro_batch])
        if visit.jobs:  # sums alone need no weights
            self._compute(block, visit, parts)
        for job in visit.sums:
            self._start_sum(block, parts[job.micro_batch])
        self.progress += 1

    def _compute(self, block: Block, visit: Visit, parts: Sequence[MicroBatch]) -> None:
        """The jobs of a visit, while the block's weights are held."""
        hold = self.weights.hold(visit.block, block.wanted(parts))
        left = len(hold)
        with hold as segments:
            for segment, data in segments:  # each waits until it is where it is computed
                left -= 1
                if not left and (foretold := block.foretold(parts)) is not None:
                    self.weights.expect(*foretold)
                for job in visit.jobs:
                    part = parts[job.micro_batch]
                    if not job.sums:
                        self._finish_sums(part)
                        with self.trace.span("compute", block.name):
                            self._start(segment, job.phases, data, part)
                    elif not left:
                        self._start_sum(block, part)

    def _start(
        self, segment: Segment, phases: Phases, data: Bytes, part: MicroBatch, summed: Sum | None = None
    ) -> None:
        """Begin phases of a segment on its device; what it comes to is added to the micro-batch's partial result.

        `summed` adds over all nodes what the heads of some models wait for.
        """

        def take(segment: Segment) -> Input:
            routed = isinstance(segment.spec, ExpertsSpec)  # its input is for the router, too
            fused = self.weights.now.single and phases >= COMPUTE and not routed  # it prepares the input itself
            return part.x if fused else part.prepared(segment.spec, segment.device, self._kernels)

        if isinstance(segment, AttentionSegment) and segment.waits and Phase.PROJECT in phases:
            segment.start(phases - _AFTER_HEADS, data, part, take)
            segment.finish(part, (summed or self._sum_now)(segment.squares(part)))
            phases = phases & _AFTER_HEADS
        partial = segment.start(phases, data, part, take)
        if partial is not None:
            part.add(partial)

    def _start_sum(self, block: Block, part: MicroBatch) -> None:
        if block.joins:
            part.join()
            return
        if self.group.trivial and self._check is unchecked and part.settles(block.residual):
            self.on_block()
            return
        partial = part.partial()
        self._check(partial, block.name)
        if len(self._flying) == IN_FLIGHT:
            self._finish_sum()
        syncing = perf_counter()
        with self.trace.span("allreduce", block.name):
            self.group.start(partial, everywhere=block is not self.blocks[-1])
        self._flying.append((part, block))
        self.clock.sync += perf_counter() - syncing

    def _sum_now(self, values: F32) -> F32:
        """The sum over all nodes of something small, behind those that are on their way."""
        while self._flying:
            self._finish_sum()
        syncing = perf_counter()
        self.group.start(values)
        total = self.group.finish()
        self.clock.sync += perf_counter() - syncing
        assert total is not None  # it is for everybody
        return total

    def _finish_sums(self, part: MicroBatch) -> None:
        """Bring a micro-batch up to the last block that it computed."""
        while any(flying is part for flying, _ in self._flying):
            self._finish_sum()

    def _finish_sum(self) -> bool:
        """Wait for the oldest sum; whether its tokens are there on this node."""
        part, block = self._flying.popleft()
        syncing = perf_counter()
        with self.trace.span("allreduce", block.name):
            total = self.group.finish()
        self.clock.sync += perf_counter() - syncing
        part.summed(block.residual, total, self._kernels)
        self.on_block()
        return total is not None

    def _waits_for_nothing(self, x: F32) -> bool:
        """Whether all blocks may run in one call: neither other nodes nor weights are awaited.

        A prompt takes long enough for people to follow it block by block, and for Python to cost nothing.
        """
        return (
            len(x) <= STREAM_TOKENS
            and self.group.trivial
            and self._order is plain
            and self.weights.now.kept is not None
            and not any(block.joins for block in self.blocks)  # a chain adds each block's result to what the next reads
        )

    def _run_chain(self, x: F32, batch: Batch) -> F32:
        if self._chain is None:
            kept = self.weights.now.kept
            assert kept is not None
            pairs = zip(self.blocks, self.weights.now.blocks, strict=True)
            blocks = [segment.chained(kept[block.number], block.residual) for block, (segment,) in pairs]
            self._chain = self._kernels.open_chain(blocks)
        with self.trace.laps("compute", self._names) as ended:
            out = self._chain.run(x, batch, ended)
        self.progress += len(self.blocks)
        self.on_block()
        return out
