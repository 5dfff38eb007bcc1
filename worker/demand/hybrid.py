"""Routed experts that the accelerator and the CPU compute together.

Each computes some of the chosen experts, and the two results are added.

The host's memory holds all experts. The accelerator computes the experts in its arena (cached copies in its memory) and
the experts that are copied to it for this step. The CPU computes the rest at the same time.
`worker.demand.arena.ExpertArena` decides which side computes each expert. The accelerator is started first. A side
without experts to compute is not called.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from scheduler.demand.policies import Key
from scheduler.demand.shared import SharedHold
from tpi.devices.base import Device, Finished, Pending
from tpi.devices.pages import Bytes
from tpi.kernels.spec import ChainBlock, ExpertsSpec, Input, Residual, Routing
from worker.demand.arena import ExpertArena
from worker.neurons.hybrid import Merged
from worker.node.microbatch import MicroBatch
from worker.node.order import Phase
from worker.node.segment import ExpertsSegment, Launch, Phases, Take

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class HybridExperts:
    """A `worker.node.segment.Segment` of this node's routed experts of one block.

    Attributes:
        device: the host, whose memory holds all these experts.
        spec: describes all these experts.
        accelerator: the device that computes the experts in `arena`.
        launch: starts a call on the accelerator.
        block: the number of the block.
        arena: the accelerator's cache of experts.
    """

    device: Device
    spec: ExpertsSpec
    accelerator: Device
    launch: Launch
    block: int
    arena: ExpertArena

    @property
    def empty(self) -> bool:
        """True if the node has no routed experts of this block."""
        return self.spec.units == 0

    def start(self, phases: Phases, data: Bytes, part: MicroBatch, take: Take) -> Pending[F32] | None:
        """Start the experts in the output phase; return None in the other phases, which compute nothing."""
        if Phase.OUTPUT not in phases:
            return None
        if self.empty:
            return Finished(lambda: np.zeros_like(part.x))
        x = take(ExpertsSegment(self.accelerator, self.launch, self.spec))
        routing = part.routed(self.spec.router, self.accelerator.kernels, x)
        held = self.arena.share(self.block, self._wanted(routing))
        try:
            pending = self._there(held, x, routing)
        finally:
            held.close()  # released after the accelerator's call
        self.arena.prefetch_next(self.block, part.x)
        if held.left_out:
            pending.append(self._here(held.left_out, data, take(self), routing))
        return Merged(pending) if pending else Finished(lambda: np.zeros_like(part.x))

    def chained(self, data: Bytes, residual: Residual) -> ChainBlock:
        """Return the experts as a part of a chain, which computes all of them on the host."""
        return ChainBlock(self.spec, data, residual)

    def _wanted(self, routing: Routing) -> Mapping[int, int]:
        """Return the number of tokens that chose each of this node's experts, without experts that no token chose."""
        counts = np.bincount(routing.experts.ravel(), minlength=self.spec.router.mixture.experts)
        return {expert: int(counts[expert]) for expert in self._pieces if counts[expert]}

    @cached_property
    def _pieces(self) -> Mapping[int, tuple[int, slice]]:
        """Number and byte range in the block of each expert's piece, by the expert's number."""
        size = self.spec.routed.neuron.unit_bytes
        ends = list(accumulate(piece.units * size for piece in self.spec.pieces))
        begins = [0, *ends]
        return {
            piece.expert: (number, slice(begins[number], ends[number])) for number, piece in enumerate(self.spec.pieces)
        }

    def _there(self, held: SharedHold, x: Input, routing: Routing) -> list[Pending[F32]]:
        """Start the accelerator's part: first the cached experts together, then each copied expert when it has
        arrived.
        """
        if not (held.ready or held.loading):
            return []
        spec, kernels = self.spec, self.accelerator.kernels
        together = [held.ready, *([key] for key in held.loading)]

        def computed(keys: Sequence[Key]) -> F32:
            weights = {self._pieces[expert][0]: held.data((block, expert)) for block, expert in keys}
            return kernels.expert_pieces(spec, weights, x, routing)

        def call() -> F32:
            first, *others = (computed(keys) for keys in together if keys)
            for other in others:
                first += other
            return first

        return [self.launch(call)]

    def _here(self, keys: Sequence[Key], data: Bytes, x: Input, routing: Routing) -> Pending[F32]:
        spec, kernels = self.spec, self.device.kernels
        pieces = (self._pieces[expert] for _, expert in keys)
        weights = {number: data[where] for number, where in pieces}
        return self.device.start(lambda: kernels.expert_pieces(spec, weights, x, routing))
