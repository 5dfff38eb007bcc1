"""A block of experts whose weights come when they are wanted: tokens choose before it is held."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler.weights import Wanted
from tpi.devices.base import Device
from tpi.kernels.constants import STREAM_TOKENS
from tpi.kernels.spec import ExpertsSpec, Routing
from worker.node.block import Block
from worker.node.microbatch import MicroBatch


@dataclass(frozen=True)
class RoutedBlock(Block):
    """`spec` is of any of its segments: all have its router. The host, `device`, has them choose."""

    spec: ExpertsSpec = field(kw_only=True)
    device: Device = field(kw_only=True)
    following: "RoutedBlock | None" = field(kw_only=True, default=None)  # the next one that is fetched

    def wanted(self, parts: Sequence[MicroBatch]) -> Wanted:
        """The experts that its tokens chose, in order; all of them for a long step, which uses about all."""
        if len(parts) > 1:
            return None  # the second's sum may be on its way while the first computes
        (part,) = parts
        kernels = self.device.kernels
        x = part.prepared(self.spec, self.device, kernels)
        return _chosen(part.routed(self.spec.router, kernels, x))

    def foretold(self, parts: Sequence[MicroBatch]) -> tuple[int, Wanted] | None:
        """What the next router makes of the hidden states as they are now: right about four times in five."""
        following = self.following
        if following is None or len(parts) > 1 or len(parts[0].x) > STREAM_TOKENS:
            return None
        return following.number, _chosen(self.device.kernels.route(following.spec.router, parts[0].x))


def _chosen(routing: Routing) -> list[int]:
    """The experts that any token chose, in order."""
    return sorted(set(routing.experts.ravel().tolist()))
