"""The experts that a node loads from disk on demand: their cache, blocks and statistics."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.demand.cache import DemandCache
from scheduler.demand.choice.replay import Recording, ReplayResult, bound
from scheduler.demand.hold import DemandedBlock
from scheduler.slots.stats import ReadClock
from scheduler.slots.workers import Readers
from scheduler.weights import Hold
from tpi.devices.base import Device, Pending
from tpi.devices.pages import Bytes, page_buffer
from tpi.errors import TpiError
from tpi.kernels.spec import ChainBlock, ExpertsSpec, Residual
from tpi.trace import NoTrace
from worker.demand.best import best_note, hits, megabytes
from worker.node.microbatch import MicroBatch
from worker.node.order import Phase
from worker.node.segment import F32, ExpertsSegment, Launch, Phases, Segment, Take
from worker.plan.checksums import Checksums
from worker.plan.modes.experts import HostSlots
from worker.plan.segments import NodeSegment
from worker.shards.image import HeldBlock


@dataclass(frozen=True, eq=False)
class GatheredExperts:
    """A `worker.node.segment.Segment` of some routed experts.

    `spec` describes all of the node's routed experts of the block. `held` has the weights of the experts to compute,
    by the index of the expert in `spec.pieces`.
    """

    device: Device
    launch: Launch
    spec: ExpertsSpec
    held: Mapping[int, Bytes]

    @property
    def empty(self) -> bool:
        """True if there are no experts to compute."""
        return not self.held

    def start(self, phases: Phases, data: Bytes, part: MicroBatch, take: Take) -> Pending[F32] | None:
        """Start to compute the experts if `phases` include OUTPUT, else return None.

        `data` is ignored: weights are in slots.
        """
        if Phase.OUTPUT not in phases:
            return None
        spec, kernels, x, held = self.spec, self.device.kernels, take(self), self.held
        routing = part.routed(spec.router, kernels, x)
        return self.launch(lambda: kernels.expert_pieces(spec, held, x, routing))

    def chained(self, data: Bytes, residual: Residual) -> ChainBlock:
        """Raise TpiError, because a chain of blocks cannot wait for weights to be loaded."""
        raise TpiError("experts that are loaded on demand cannot be part of a chain; run them block by block")


class DemandExperts:
    """A node's cache of experts that are loaded from disk on demand. A `scheduler.weights.StepListener`."""

    def __init__(
        self,
        plan: HostSlots,
        held: Sequence[HeldBlock],
        reads: ReadClock,
        trace: NoTrace,
        verify: bool,
    ) -> None:
        """Open the cache of `plan`.

        `reads` is the clock of the window that shares the disk. If `verify` is True, units are compared with their
        hashes when they are first loaded.
        """
        self._plan = plan
        source, readers = plan.source, Readers(plan.source.threads)
        check = Checksums(list(plan.units.values()), held) if verify else None
        self.policy = plan.select(source.keys)
        policy = self.policy.choice.open(np.array([block for block, _ in source.keys], np.int64))
        memory: Bytes = page_buffer(plan.slots * source.slot_bytes)
        self.cache = DemandCache(source, memory, policy, readers, verify=check, reads=reads, trace=trace)
        self._best: ReplayResult | None = None  # the last result of `_bound`

    def blocks(
        self, always: Sequence[Sequence[tuple[Segment, Hold]]], open_one: Callable[[NodeSegment], Segment]
    ) -> dict[int, DemandedBlock[Segment]]:
        """Return the blocks whose experts are loaded on demand, by block number.

        Args:
            always: of each block, the segments that every step needs, with their holds.
            open_one: turns a segment of the plan into one that a device computes.
        """
        units: dict[int, dict[int, NodeSegment]] = {}
        for (block, expert), segment in self._plan.units.items():
            units.setdefault(block, {})[expert] = segment
        return {
            block: DemandedBlock(block, always[block], list(own), self.cache, _gathered(own, open_one))
            for block, own in units.items()
        }

    def begin(self, short: bool) -> None:
        """Begin a step, so that the cache counts the uses of experts by step. `short` is ignored."""
        self.cache.begin()

    def abandon(self) -> None:
        """Do nothing: the holds of an aborted step release their units."""

    def describe(self) -> str:
        """Return the cache's statistics as a sentence for the user; empty before an expert was used."""
        stats = self.cache.stats()
        if not stats.uses:
            return ""
        recording, recorded = self.cache.recording()
        best = self._bound(recording)
        return (
            f"experts are read from disk on demand: {self.cache.capacity} of {len(self._plan.units)} are in memory, "
            f"{hits(stats)} of the chosen ones were there {best_note(hits, stats, recorded, best, 'at best')}, "
            f"{megabytes(stats)} MB read per step {best_note(megabytes, stats, recorded, best, 'at best')}, "
            f"{stats.ahead} were prefetched ({stats.ahead_used} used, {stats.ahead_wasted} wasted); "
            f"evicted {self.policy.sentence}"
        )

    def close(self) -> None:
        """Join the readers. Further calls do nothing."""
        self.cache.close()

    def _bound(self, recording: Recording) -> ReplayResult:
        """Return the hit rate and bytes of Belady's optimal policy in the recorded steps: the best possible figures."""
        if self._best is None or len(recording.steps) != self._best.steps:
            capacity = self.cache.capacity
            self._best = bound(recording.of_at_most(capacity), capacity, self._plan.source.slot_bytes)
        return self._best


def _gathered(
    units: Mapping[int, NodeSegment], open_one: Callable[[NodeSegment], Segment]
) -> Callable[[Sequence[tuple[int, Bytes]]], Segment]:
    """Return a function that makes one segment of some of a block's experts, given the number and weights of each."""
    piece = {expert: number for number, expert in enumerate(units)}
    parts = list(units.values())
    whole = open_one(NodeSegment(parts[0].block, tuple(run for part in parts for run in part.runs)))
    assert isinstance(whole, ExpertsSegment)  # only experts are loaded on demand

    def gathered(held: Sequence[tuple[int, Bytes]]) -> Segment:
        weights = {piece[expert]: data for expert, data in held}
        return GatheredExperts(whole.device, whole.launch, whole.spec, weights)

    return gathered
