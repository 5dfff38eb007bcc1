"""A block of experts that are loaded on demand: its tokens are routed before the block is held."""

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
    """A block of routed experts that are loaded on demand.

    `spec` is the description of any of its segments, because all of them use one router. `device` is the host.
    """

    spec: ExpertsSpec = field(kw_only=True)
    device: Device = field(kw_only=True)
    following: "RoutedBlock | None" = field(kw_only=True, default=None)  # the next block that loads on demand

    def wanted(self, parts: Sequence[MicroBatch]) -> Wanted:
        """Return the experts that the tokens choose, ascending; None (all) for several micro-batches."""
        if len(parts) > 1:
            return None  # the second one's input may not be reduced yet
        (part,) = parts
        kernels = self.device.kernels
        x = part.prepared(self.spec, self.device, kernels)
        return _chosen(part.routed(self.spec.router, kernels, x))

    def predicted_units(self, parts: Sequence[MicroBatch]) -> tuple[int, Wanted] | None:
        """Return the number of the next block of experts, and the experts that it will probably need.

        That block's router is applied to the hidden states before this block; about 80% of its choices are right.
        Return None if there is no next block, for several micro-batches, and for long steps.
        """
        following = self.following
        if following is None or len(parts) > 1 or len(parts[0].x) > STREAM_TOKENS:
            return None
        return following.number, _chosen(self.device.kernels.route(following.spec.router, parts[0].x))


def _chosen(routing: Routing) -> list[int]:
    return sorted(set(routing.experts.ravel().tolist()))
