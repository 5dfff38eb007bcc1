"""One member of the tensor-parallel group, rank 0 included: a block loop with page tables set by the master."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from allreduce.base import Work, idle
from scheduler.demand.stats import DemandStats
from scheduler.model.steady import judge_streaming
from scheduler.model.timeline import NO_OTHER_WAITS, OtherWaits
from scheduler.window.stats import WindowPosition, WindowStats
from tpi.kernels.kv import pages_for, states_for
from tpi.kernels.spec import PAGE_TOKENS, Batch
from tpi.net.messages import (
    Step,
)
from tpi.net.questions import Steady
from tpi.trace import NoTrace
from worker.node.loop import BlockLoop
from worker.node.pages import PageTables
from worker.node_plan import Pass
from worker.plan.residence import Residence
from worker.service.served import Figures

if TYPE_CHECKING:
    from allreduce.hops import Hops
    from scheduler.demand.records.stats import RecordStats
    from worker.accelerator.accelerated import Accelerators
    from worker.demand.fetched import DemandExperts
    from worker.measure.watch import StepWatch
    from worker.neurons.sparse import SparseNode
    from worker.plan.case import Mode
    from worker.plan.offload import OffloadPlan

F32 = npt.NDArray[np.float32]


class Node:
    """A node that computes the steps that the master sends.

    The daemon uses it through the protocol `worker.service.served.ServedNode`.
    """

    def __init__(
        self,
        loop: BlockLoop,
        residence: Residence,
        resources: ExitStack,
        link: "Accelerators | None" = None,
        fetched: "DemandExperts | None" = None,
        sparse: "SparseNode | None" = None,
        recurrent: bool = False,
        hops: "Hops | None" = None,
        passes: Sequence[Pass] = (),
    ) -> None:
        """Create a node; `worker.node.build.build_node` is the usual way.

        Args:
            loop: computes the steps.
            residence: says which weights are resident, and where.
            resources: closed together with the node.
            link: the accelerators, if the node has any.
            fetched: the experts that are loaded on demand, if any.
            sparse: predicts the active neurons, if the plan has predictors.
            recurrent: True if the model has layers with states.
            hops: carry hidden states from stage to stage; None if all nodes are in one stage.
            passes: the passes of this node in a step, one per stage; empty for a single pass through all blocks.
        """
        self.fetched = fetched
        self.sparse = sparse
        self.link = link
        self.loop = loop
        self.hops = hops
        self._passes = passes or (Pass(0, range(len(loop.blocks))),)
        self.budget = residence.budget
        self.window = loop.weights.window
        self.streamed = WindowStats()
        self.watch: StepWatch | None = None  # compares step times with the plan's prediction; set by the caller
        self._residence = residence
        self._by_neurons = residence.mode == "neurons" and residence.offload is None  # read from disk one by one
        self._resources = resources
        states = states_for(residence.budget.pages) if recurrent else 0
        self._tables = PageTables(residence.budget.pages, PAGE_TOKENS, states)

    @property
    def offload(self) -> "OffloadPlan | None":
        """The plan of the accelerators; None without one."""
        return self._residence.offload

    @property
    def mode(self) -> "Mode":
        """The mode that the node runs in, one of those of `worker.plan.modes`."""
        return self._residence.mode

    @property
    def resident(self) -> bool:
        """True if all weights of the node are in memory."""
        return not self.budget.placement.streamed_bytes and self.fetched is None

    @property
    def pages(self) -> int:
        """Size of the KV cache in pages."""
        return self.budget.pages

    @property
    def prefill_tokens(self) -> int:
        """Tokens of the longest step that the memory of the node and its accelerators allows."""
        offload = self._residence.offload
        return self.budget.chunk if offload is None else min(self.budget.chunk, offload.longest)

    @property
    def segments(self) -> list[int]:
        """Number of segments of each block."""
        return [len(segments) for segments in self.loop.weights.now.blocks]

    @property
    def progress(self) -> int:
        """A count that grows with every block computed and every byte read, to tell a slow node from a stuck one."""
        return self.loop.progress + self.window.progress + self._wanted().read_bytes

    @property
    def position(self) -> WindowPosition:
        """Position of the memory window in its cycle; may be read while a step runs."""
        return self.window.position()

    @property
    def trace(self) -> NoTrace:
        """The recorder of the node's spans."""
        return self.loop.trace

    def run(self, step: Step) -> F32 | None:
        """Compute one step, and return the last hidden states `[tokens, hidden]` on rank 0, None on other ranks.

        A step without entries computes nothing: it lets the group measure and choose how to sum.
        """
        return self.result(step, self.compute(step))

    def compute(self, step: Step) -> F32 | None:
        """Compute the layers of this node.

        The lowest rank of the node's last stage returns the hidden states, other ranks None. Before each of its stages
        except the first, the node waits for the hidden states of the stage before. On rank 0, call `result` for one
        step after the other; meanwhile other steps may be computed.
        """
        self._tables.release(step.released)
        if not step.entries:
            self.loop.group.tune(self._rehearsal())
            return None
        batch, clock = self._tables.batch(step.entries), self.loop.clock
        if step.per_layer.size:
            batch = replace(batch, per_layer=step.per_layer)
        before = clock.total - clock.sync
        tokens = len(batch.positions)
        for each in self._passes:
            out = self._pass(each, step, batch)
        if self.watch is not None:
            self.watch.note(tokens, int(batch.positions[-1]) + 1, clock.total - clock.sync - before)
        self.streamed += self.window.take()
        return out

    def _pass(self, one: Pass, step: Step, batch: Batch) -> F32 | None:
        """Compute the blocks of one pass.

        Return the hidden states on the lowest rank of the stage, None on other ranks.
        """
        if self.hops is None:
            return self.loop.forward(step.x, batch, step.step, one.blocks)
        with self.trace.span("hop", "into the stage"):
            x = self.hops.enter(one.stage, step.step, step.x, len(batch.positions))
        out = self.loop.forward(x, batch, step.step, one.blocks)
        self.hops.leave(one.stage, step.step, out)
        return out

    def result(self, step: Step, own: F32 | None) -> F32 | None:
        """Return the hidden states after the last layer on rank 0, None on other ranks.

        `own` is the result of `compute`.
        """
        if self.hops is None or not step.entries:
            return own
        with self.trace.span("hop", "out of the last stage"):
            return self.hops.result(step.step, own, step.tokens)

    def _rehearsal(self) -> Work:
        """Return a function that computes one block of a prefill step of zeros, and overwrites the pages from 0 on.

        On a node that streams weights or has an accelerator, the function does nothing, because it would read weights
        out of order.
        """
        loop = self.loop
        if self.window.kept is None or self._residence.offload is not None or self.fetched is not None:
            return idle
        one, payload = loop.group.spec.payload_values
        tokens = min(payload // one, self.prefill_tokens, self.pages * PAGE_TOKENS)
        blocks = cycle(range(len(loop.blocks)))

        def work(parts: int) -> None:
            part = max(1, tokens // parts)
            loop.rehearse(next(blocks), np.zeros((part, one), np.float32), _blank(part))

        return work

    def rehearse(self, blocks: Sequence[int] | None = None) -> None:
        """Compute `blocks` (None: all) for a decode step and a prefill step of zeros; overwrite the pages from 0 on."""
        blocks = range(len(self.loop.blocks)) if blocks is None else blocks
        one = self.loop.group.spec.payload_values[0]
        for tokens in (1, min(self.prefill_tokens, self.pages * PAGE_TOKENS)):
            self.loop.weights.begin(tokens)
            x, batch = np.zeros((tokens, one), np.float32), _blank(tokens)
            for block in blocks:
                self.loop.rehearse(block, x, batch)
        self.window.take()

    def figures(self) -> Figures:
        """Return the totals of steps, times, bytes read, bytes sent and memory since the start."""
        clock, group, streamed = self.loop.clock, self.loop.group.stats, self.streamed
        wanted, hops = self._wanted(), self.hops
        sent, received = hops.traffic if hops else (0, 0)
        stalled = streamed.stall_seconds + wanted.stall_seconds
        stalled += self.link.figures.stall_seconds if self.link else 0.0
        return Figures(
            steps=clock.steps,
            tokens=clock.tokens,
            weight_bytes=self._residence.nbytes,
            compute_s=max(0.0, clock.total - clock.sync - stalled),
            sync_s=clock.sync,
            hop_s=hops.seconds if hops else 0.0,
            stall_s=stalled,
            streamed_bytes=streamed.read_bytes + wanted.read_bytes,
            disk_s=streamed.read_seconds,
            sent_bytes=group.sent_bytes + sent,
            received_bytes=group.received_bytes + received,
            resident_bytes=self.budget.placement.memory_bytes + self.budget.demand_bytes,
            planned_bytes=self.budget.used,
            dropped=group.dropped,
            accelerator=_remark(self.link or self.fetched or self.sparse),
        )

    def _wanted(self) -> "DemandStats | RecordStats":
        if self.fetched is not None:
            return self.fetched.cache.stats()
        records = None if self.sparse is None else self.sparse.records
        return DemandStats() if records is None else records.stats()

    def steady(self, other_waits: OtherWaits = NO_OTHER_WAITS) -> Steady | None:
        """Return whether the node waits for its disk, from measured times, and which placement would end that.

        Return None if the node streams no blocks, has an accelerator, reads single neurons, or has run no step.
        `other_waits` has the waits for disks that are not for this node's blocks, in seconds per token.
        """
        window, planned, kinds = self.window, self.budget.placement, self._residence.kinds
        if self.link or self._by_neurons or not window.placement.streamed_bytes or not self.loop.clock.steps:
            return None
        costs, history = window.costs(), window.history()
        found = judge_streaming(window.placement, costs, history, self.segments, planned, kinds, other_waits)
        times, asked = found.times, self._residence
        return Steady(
            times.attention, times.ffn, times.allreduce, times.load_attention, times.load_ffn,
            found.loose, found.tight, found.steady, found.stall_seconds,
            found.window or 0, found.retain or 0,
            asked.memory_with(found.window, found.retain or 0) if found.window else 0,
            asked.memory_for(found.least_bytes) if found.least_bytes else 0, times.busy, times.load,
        )  # fmt: skip

    def close(self) -> None:
        """Release memory, threads and sockets, and compare the disk's speed with the remembered speed."""
        self._resources.close()
        if not self._by_neurons:  # otherwise the time includes reads of single neurons
            self._residence.check_disk_speed(self.streamed.read_bytes, self.streamed.read_seconds)
        if self.watch is not None:
            self.watch.close()


def _remark(of: "Accelerators | DemandExperts | SparseNode | None") -> str:
    return of.describe() if of else ""


def _blank(tokens: int) -> Batch:
    """Return the batch of one sequence of `tokens` tokens in the pages from 0 on, which writes its state to slot 0."""
    table = np.arange(pages_for(tokens), dtype=np.int32)[None]
    states = np.array([[-1, 0, 0, 0]], np.int32)
    return Batch(np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.int32), table, states)
