"""A segment that computes some routed experts of a block, from their slots of the cache, in one call."""

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
