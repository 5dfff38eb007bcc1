"""The experts of a node that come when they are wanted: their cache, their blocks, and what is said of them."""

from collections.abc import Callable, Sequence

import numpy as np

from scheduler.demand.cache import DemandCache
from scheduler.demand.cliff import GUARDED
from scheduler.demand.hold import DemandedBlock
from scheduler.demand.replay import bound
from scheduler.demand.workers import Readers
from scheduler.storage.disk import Disk
from scheduler.weights import Hold
from scheduler.window.stats import ReadClock
from tpi.devices.pages import Bytes, page_buffer
from tpi.trace import NoTrace
from worker.demand.plan import DemandPlan
from worker.node.segment import Segment
from worker.plan.checksums import Checksums
from worker.plan.segments import NodeSegment
from worker.shards.image import HeldBlock


class Fetched:
    """What a node fetches on demand. A `scheduler.weights.StepListener`."""

    def __init__(
        self,
        plan: DemandPlan,
        held: Sequence[HeldBlock],
        disk: Disk,
        reads: ReadClock,
        trace: NoTrace,
        verify: bool,
    ) -> None:
        """`reads` is of the window that shares the disk; with `verify` units are compared with their hashes."""
        self._plan = plan
        source = plan.source(held, disk)
        self._unit_bytes = source.slot_bytes
        check = Checksums(list(plan.units.values()), held) if verify else None
        policy = GUARDED.open(np.array([block for block, _ in source.keys], np.int64))
        memory: Bytes = page_buffer(plan.memory_bytes)[: plan.memory_bytes]
        self.cache = DemandCache(source, memory, policy, Readers(disk.threads), verify=check, reads=reads, trace=trace)
        self._best: tuple[int, float] = (0, 0.0)  # steps, and Belady's hit rate in them

    def blocks(
        self, always: Sequence[Sequence[tuple[Segment, Hold]]], open_one: Callable[[NodeSegment], Segment]
    ) -> dict[int, DemandedBlock[Segment]]:
        """The blocks of experts, by their number; `always` is what every step needs of every block."""
        units: dict[int, dict[int, Segment]] = {}
        for (block, expert), segment in self._plan.units.items():
            units.setdefault(block, {})[expert] = open_one(segment)
        return {block: DemandedBlock(block, always[block], own, self.cache) for block, own in units.items()}

    def begin(self, short: bool) -> None:
        """See `scheduler.weights.StepListener`."""
        self.cache.begin()

    def abandon(self) -> None:
        """See `scheduler.weights.StepListener`; a hold gives back what it held."""

    def describe(self) -> str:
        """What became of it, in a sentence with the figures; empty before anything was wanted."""
        stats = self.cache.stats()
        if not stats.uses:
            return ""
        return (
            f"experts come from disk as they are wanted: {self.cache.capacity} of {len(self._plan.units)} in memory, "
            f"{stats.hit_rate:.0%} found there (at best {self._bound():.0%}), "
            f"{stats.bytes_per_step / 1e6:.1f} MB read per step"
        )

    def close(self) -> None:
        """Join the readers. Idempotent."""
        self.cache.close()

    def _bound(self) -> float:
        """Belady's hit rate in the steps that were recorded."""
        recording, _ = self.cache.recording()
        if len(recording.steps) != self._best[0] and recording.largest_use <= self.cache.capacity:
            self._best = (len(recording.steps), bound(recording, self.cache.capacity, self._unit_bytes).hit_rate)
        return self._best[1]
