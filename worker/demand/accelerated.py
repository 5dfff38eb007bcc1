"""A node's accelerator with a cache of routed experts that are copied to it on demand."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from scheduler.demand.policies import Key
from scheduler.window.window import Window
from tpi.devices.pages import Bytes
from tpi.errors import PlanError
from worker.accelerator.accelerated import Accelerators, LinkFigures
from worker.demand.arena import ExpertArena
from worker.demand.best import MB
from worker.demand.hybrid import HybridExperts
from worker.node.segment import ExpertsSegment, Segment, launching
from worker.plan.modes.experts import CardSlots, recording_of, routed_experts


class ExpertAccelerated(Accelerators):
    """An `Accelerators` whose accelerator caches some of the routed experts."""

    arena: ExpertArena | None = None  # None until `open_rings`

    @property
    def figures(self) -> LinkFigures:
        """The traffic over the link since the start, including experts."""
        found = super().figures
        if self.arena is None:
            return found
        stats = self.arena.cache.stats()
        return replace(found, weight_bytes=found.weight_bytes + stats.read_bytes)

    def open_rings(self, window: Window) -> None:
        """Fill the arena from `window`, which has all experts in memory, then open the rings.

        Raises:
            PlanError: if `window` does not have all experts in memory.
            DeviceFullError: if the accelerator has no room for the arena.
            DeviceError: if the experts cannot be copied.
        """
        if window.kept is None:
            raise PlanError(
                "experts are copied to the accelerator from memory, which does not hold them all; give more --memory"
            )
        self._blocks = {block.layer: block.number for block in self._plan.blocks if block.kind == "experts"}
        slots: CardSlots = self._details
        units = self._units(window.kept)
        cuts = range(slots.slot_bytes, slots.arena_bytes, slots.slot_bytes)
        memory = self._allocations.allocate(self.device, slots.arena_bytes, cuts)
        recording = recording_of(self._plan.routing, list(units))
        self.arena = ExpertArena(self.device, memory, units, slots.costs, self._queue, recording, self._trace)
        super().open_rings(window)

    def adapt_host_segment(self, segment: Segment, layer: int, name: str) -> Segment:
        """Return a `HybridExperts` for the host's routed experts; other segments are returned unchanged."""
        if not isinstance(segment, ExpertsSegment) or segment.empty:
            return segment
        assert self.arena is not None  # opened before any segment
        block = self._blocks[layer]
        self.arena.routers[block] = segment.spec.router
        launch = launching(self.device, self._trace, name)
        return HybridExperts(segment.device, segment.spec, self.device, launch, block, self.arena)

    def begin(self, short: bool) -> None:
        """Begin a step; raise the error of an earlier copy that failed without a caller waiting for it."""
        super().begin(short)
        if self.arena is not None:
            self.arena.begin(short)

    def abandon(self) -> None:
        """Discard the transfers and predictions of a step that was aborted."""
        super().abandon()
        if self.arena is not None:
            self.arena.abandon()

    def describe(self) -> str:
        """Return a sentence for the user on what the accelerator holds and computed, and on the bytes that moved."""
        if self.arena is None or not self.arena.cache.stats().uses:
            return super().describe()
        plan, moved = self.offload, self.figures
        prompts = f"; steps of {plan.crossover} tokens and more take all of them there" if plan.long else ""
        return (
            f"{self.device.name} holds all weights but the routed experts, and {self.arena.describe()}; keys and "
            f"values are {'there' if plan.kv == 'gpu' else 'in memory'}{prompts}; {moved.weight_bytes / MB:.0f} MB of "
            f"weights and {moved.kv_bytes / MB:.0f} MB of keys and values moved"
        )

    def close(self) -> None:
        """Close the arena, stop all transfers and join their threads. Further calls do nothing."""
        if self.arena is not None:
            self.arena.close()
        super().close()

    def _units(self, kept: Sequence[Bytes]) -> Mapping[Key, Bytes]:
        """Return this node's part of every routed expert, taken from `kept`, the bytes of the window's segments."""
        lying = {
            segment.block.number: segment
            for block in self._places.short
            for segment in block
            if segment.memory == "window" and segment.block.kind == "experts"
        }
        found: dict[Key, Bytes] = {}
        for (block, expert), unit in routed_experts(self._plan):
            whole = lying[block]
            begin = whole.offset_of(unit)
            found[block, expert] = kept[whole.number][begin : begin + unit.nbytes]
        return found
