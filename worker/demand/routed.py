"""A block of experts whose weights come when they are wanted: tokens choose before it is held."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler.weights import Wanted
from tpi.devices.base import Device
from tpi.kernels.spec import ExpertsSpec
from worker.node.block import Block
from worker.node.microbatch import MicroBatch


@dataclass(frozen=True)
class RoutedBlock(Block):
    """`spec` is of any of its segments: all have its router. The host, `device`, has them choose."""

    spec: ExpertsSpec = field(kw_only=True)
    device: Device = field(kw_only=True)

    def wanted(self, parts: Sequence[MicroBatch]) -> Wanted:
        """The experts that its tokens chose, in order; all of them for a long step, which uses about all."""
        if len(parts) > 1:
            return None  # the second's sum may be on its way while the first computes
        (part,) = parts
        kernels = self.device.kernels
        x = part.prepared(self.spec, self.device, kernels)
        chosen: list[int] = sorted(set(part.routed(self.spec.router, kernels, x).experts.ravel().tolist()))
        return chosen
