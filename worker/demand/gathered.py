"""Some routed experts of a block, wherever the cache has them, computed in one call."""

from collections.abc import Mapping
from dataclasses import dataclass

from tpi.devices.base import Device, Pending
from tpi.errors import TpiError
from tpi.kernels.spec import ChainBlock, ExpertsSpec, Residual
from worker.node.microbatch import MicroBatch
from worker.node.order import Phase
from worker.node.segment import F32, Bytes, Launch, Phases, Take


@dataclass(frozen=True, eq=False)
class GatheredExperts:
    """A `worker.node.segment.Segment`. `spec` is of all of the node's routed experts of the block.

    `held` has the weights of those that are computed, by the number of their piece.
    """

    device: Device
    launch: Launch
    spec: ExpertsSpec
    held: Mapping[int, Bytes]

    @property
    def empty(self) -> bool:
        """See `worker.node.segment.Segment.empty`."""
        return not self.held

    def start(self, phases: Phases, data: Bytes, part: MicroBatch, take: Take) -> Pending[F32] | None:
        """See `worker.node.segment.Segment.start`; `data` is nothing, for all weights are held."""
        if Phase.OUTPUT not in phases:
            return None
        spec, kernels, x, held = self.spec, self.device.kernels, take(self), self.held
        routing = part.routed(spec.router, kernels, x)
        return self.launch(lambda: kernels.expert_pieces(spec, held, x, routing))

    def chained(self, data: Bytes, residual: Residual) -> ChainBlock:
        """See `worker.node.segment.Segment.chained`; raises TpiError, for a chain waits for nothing."""
        raise TpiError("experts that come when they are wanted are in no chain; run them block by block")
