"""The block loop, which runs one node's part of the model: the same code on the master (rank 0) and on every worker.

The order of a step's tasks is data (`worker.node.order`). The loop runs any order that keeps the blocks and phases of
each micro-batch in sequence. By default, a long step is divided into two micro-batches, the halves of its tokens. While
the sum of one is on the network, the other computes, and each block's weights are held once for both.
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
from tpi.devices.base import Device
from tpi.kernels import Chain, Kernels
from tpi.kernels.constants import STREAM_TOKENS
from tpi.kernels.spec import Batch, ExpertsSpec, Input
from tpi.trace import OFF, NoTrace
from worker.node.block import Block
from worker.node.division import Division, Halves
from worker.node.microbatch import MicroBatch
from worker.node.order import COMPUTE, Phase, Visit, visits
from worker.node.segment import AttentionSegment, Phases, Segment

F32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Sum = Callable[[F32], F32]
Check = Callable[[F32, str], None]
"""A function that gets a partial result and the name of its block, and raises if the result is wrong."""

_AFTER_HEADS = frozenset({Phase.ATTEND, Phase.OUTPUT})


def _as_it_is(values: F32) -> F32:
    return values


def unchecked(partial: F32, name: str) -> None:
    """Do nothing: accept any partial result."""


@dataclass
class StepClock:
    """Totals of this node's steps since the start; times in seconds."""

    steps: int = 0
    tokens: int = 0
    total: float = 0.0
    sync: float = 0.0  # in allreduce: transfer, latency, and waiting for slower nodes


class BlockLoop:
    """The loop over all blocks that computes each step, holds its weights, and sums its results over the group."""

    def __init__(
        self,
        blocks: Sequence[Block],
        weights: Weights[Segment],
        group: Group,
        kernels: Kernels,
        trace: NoTrace = OFF,
        check: Check = unchecked,
        division: Division | None = None,
    ) -> None:
        """Create the loop.

        Args:
            blocks: all blocks of the model, in order of use.
            weights: the weights of this node's units.
            group: the collective that sums partial results.
            kernels: the host's kernels, which add residuals.
            trace: records the spans of computations and sums.
            check: called with each partial result of this node, and the block's name, before it is summed; may raise.
            division: divides steps into micro-batches and orders their tasks. None: halves, computed block by block.
        """
        self.blocks = blocks
        self.weights = weights
        self.group = group
        self.trace = trace
        self.clock = StepClock()
        self.progress = 0  # blocks computed since the start; heartbeats report it
        self.on_block: Callable[[], object] = lambda: None  # called after each block, or after all of a short step
        self._kernels = kernels
        self._check = check
        self._division: Division = division or Halves(group)
        self._flying = deque[tuple[MicroBatch, Block]]()  # micro-batch and block of each sum under way, oldest first
        self._all = range(len(blocks))
        self._chains: dict[range, Chain] = {}  # a chain of the blocks of each pass; opened when first used
        self._names = [block.name for block in blocks]

    def forward(self, x: F32, batch: Batch, step: int, blocks: range | None = None) -> F32 | None:
        """Run one step through all blocks, or through the blocks of one pass.

        Args:
            x: `[tokens, hidden]` float32, the embedded tokens; the same on every node.
            batch: the position of each token in its sequence, and the pages for its keys and values.
            step: number of the step; the collective drops messages of other steps.
            blocks: numbers of the blocks to run; None: all. A step begins with the pass that has block 0.

        Returns:
            On rank 0, the hidden states `[tokens, hidden]` after the last block. On other ranks None, since only the
            master needs the last sum.
        """
        started, own = perf_counter(), self._all if blocks is None else blocks
        if own.start == 0:
            self.weights.begin(len(x))
            self.clock.steps += 1
            self.clock.tokens += len(batch.positions)
        alone = self._waits_for_nothing(x, own)
        out = self._run_chain(x, batch, own) if alone else self._run(x, batch, step, own)
        self.clock.total += perf_counter() - started
        return out

    def rehearse(self, index: int, x: F32, batch: Batch) -> None:
        """Compute the block with number `index` for `x` `[tokens, hidden]`, and discard the result.

        The keys and values in the pages that `batch` names are overwritten.
        """
        part = self._division.alone(x, batch)
        with self.weights.hold(index) as segments:
            for segment, data in segments:
                self._start(segment, COMPUTE, data, part, _as_it_is)
        part.partial()
        self.progress += 1

    def _run(self, x: F32, batch: Batch, step: int, blocks: range) -> F32 | None:
        self.group.begin(step)
        self._flying.clear()
        parts, order = self._division.divide(x, batch)
        try:
            for visit in visits(order, blocks, len(parts)):
                self._visit(visit, parts)
            received = True
            while self._flying:
                received = self._finish_sum()
            return self._division.joined(parts) if received else None
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
        hold = self.weights.hold(visit.block, block.wanted(parts))
        left = len(hold)
        with hold as segments:
            for segment, data in segments:  # each iteration waits until the segment's weights are on its device
                left -= 1
                if not left and (predicted := block.predicted_units(parts)) is not None:
                    self.weights.expect(*predicted)
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
        """Start `phases` of a segment on its device, and add the result to the micro-batch's partial result.

        `summed` returns the sum of its argument over all nodes. Models whose norms span the heads of all nodes need
        such a sum between projection and attention.
        """

        def take(segment: Segment) -> Input:
            routed = isinstance(segment.spec, ExpertsSpec)  # the router needs the prepared input too
            fused = self.weights.now.single and phases >= COMPUTE and not routed  # the kernel prepares the input itself
            return part.x if fused else part.prepared(segment.spec, segment.device, self._kernels)

        if isinstance(segment, AttentionSegment) and segment.waits and Phase.PROJECT in phases:
            segment.start(phases - _AFTER_HEADS, data, part, take)
            segment.finish(part, (summed or self._sum_now)(segment.squares(part)))
            phases = phases & _AFTER_HEADS
        partial = segment.start(phases, data, part, take)
        if partial is not None:
            part.add(partial)

    def _start_sum(self, block: Block, part: MicroBatch) -> None:
        if block.sums_with_next:
            part.join(stacked=block.sums_with_next == "stacked")
            return
        if self.group.trivial and self._check is unchecked and part.finish_alone(block.residual):
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
        """Return the sum of the small array `values` over all nodes, after finishing the sums that are under way."""
        while self._flying:
            self._finish_sum()
        syncing = perf_counter()
        self.group.start(values)
        total = self.group.finish()
        self.clock.sync += perf_counter() - syncing
        assert total is not None  # an allreduce gives every node the sum
        return total

    def _finish_sums(self, part: MicroBatch) -> None:
        """Finish all sums of a micro-batch, so that its hidden states include the last block that it computed."""
        while self._flying and any(flying is part for flying, _ in self._flying):
            self._finish_sum()

    def _finish_sum(self) -> bool:
        """Wait for the oldest sum under way; return True if this node has its result."""
        part, block = self._flying.popleft()
        syncing = perf_counter()
        with self.trace.span("allreduce", block.name):
            total = self.group.finish()
        self.clock.sync += perf_counter() - syncing
        part.summed(block.residual, total, self._kernels)
        self.on_block()
        return total is not None

    def _waits_for_nothing(self, x: F32, blocks: range) -> bool:
        """Return True if `blocks` can run as a chain, which is one kernel call.

        A node can run a chain if it is alone and one device has all weights in memory, because it then waits for
        nothing between blocks. On the host, long steps run block by block: they can then report progress, and the
        overhead of Python is negligible. On an accelerator, a chain saves two copies of the hidden states per block.
        """
        return (
            bool(blocks)
            and self.group.trivial
            and self.weights.now.kept is not None
            and (len(x) <= STREAM_TOKENS or self._device(blocks).kernels is not self._kernels)
            and not any(
                block.sums_with_next or block.residual.per_layer for block in self.blocks[blocks.start : blocks.stop]
            )  # a chain adds each block's residual before the next, and has no embeddings of layers
        )

    def _device(self, blocks: range) -> Device:
        """Return the device that holds the weights of `blocks`, the same for all."""
        return self.weights.now.blocks[blocks.start][0].device

    def _run_chain(self, x: F32, batch: Batch, blocks: range) -> F32:
        own = slice(blocks.start, blocks.stop)
        if blocks not in self._chains:
            kept = self.weights.now.kept
            assert kept is not None
            pairs = zip(self.blocks[own], self.weights.now.blocks[own], strict=True)
            parts = [segment.chained(kept[block.number], block.residual) for block, (segment,) in pairs]
            self._chains[blocks] = self._device(blocks).kernels.open_chain(parts)
        with self.trace.laps("compute", self._names[own]) as ended:
            out = self._chains[blocks].run(x, batch, ended)
        self.progress += len(blocks)
        self.on_block()
        return out
