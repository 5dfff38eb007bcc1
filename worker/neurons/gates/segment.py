"""Feed-forward blocks that are computed gate first: of up and down the neurons alone that their gate calls for.

Nothing is predicted: the gate, a third of a block, is computed whole, and says of each neuron what it can count for
(`tpi.kernels.gated`). A step of several tokens computes the union of what they need, one of more
than `STREAM_TOKENS`, which is what kernels choose for, all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tpi.devices.base import Device, Pending
from tpi.devices.pages import Bytes
from tpi.errors import TpiError
from tpi.kernels.gated import GatedKernels
from tpi.kernels.spec import STREAM_TOKENS, ChainBlock, FfnSpec, Input, Residual
from worker.node.microbatch import MicroBatch
from worker.node.order import Phase
from worker.node.segment import FfnSegment, Launch, Phases, Segment, Take
from worker.plan.node_plan import NodePlan
from worker.shards.image import HeldBlock

F32 = npt.NDArray[np.float32]
_NEVER = np.finfo(np.float32).max  # an activation that no neuron reaches: what fills the last unit is never computed


class GatedNode:
    """What a node's gated blocks have in common."""

    def __init__(self, least: Mapping[int, F32]) -> None:
        """`least` by layer: of each of this node's neurons, the smallest activation with which it is computed."""
        self._least = least
        self.computed = self.of = 0  # neurons whose up and down were computed, of so many that could be left out

    @property
    def skipped(self) -> float:
        """The share of the neurons that was left out, where any could be."""
        return 1 - self.computed / max(1, self.of)

    def describe(self) -> str:
        """What became of it, in a sentence; empty before anything was computed."""
        return f"{self.skipped:.1%} of the neurons were skipped after their gate" if self.of else ""

    def note(self, computed: int, of: int) -> None:
        """So many neurons of a block were computed."""
        self.computed += computed
        self.of += of

    def adapted(self, segment: Segment, layer: int, first: int) -> Segment:
        """A segment with a node's neurons from `first` on, which chooses among them; others as they are."""
        kernels = segment.device.kernels
        if not isinstance(segment, FfnSegment) or segment.empty or not isinstance(kernels, GatedKernels):
            return segment
        if layer not in self._least:
            return segment
        width = segment.spec.neuron.units * segment.spec.neuron.width
        own = self._least[layer][first : first + width]
        padded = np.pad(own, (0, width - len(own)), constant_values=_NEVER)
        return GatedFfn(segment, kernels, padded, len(own), self)


@dataclass(frozen=True, eq=False)
class GatedFfn:
    """A `worker.node.segment.Segment`: `plain`, of which `least` `[units * width]` says what is left out."""

    plain: FfnSegment
    kernels: GatedKernels
    least: F32
    neurons: int  # without what fills the last unit
    node: GatedNode

    @property
    def device(self) -> Device:
        """See `Segment.device`."""
        return self.plain.device

    @property
    def launch(self) -> Launch:
        """How its calls are started."""
        return self.plain.launch

    @property
    def spec(self) -> FfnSpec:
        """See `Segment.spec`."""
        return self.plain.spec

    @property
    def empty(self) -> bool:
        """See `Segment.empty`."""
        return self.plain.empty

    def start(self, phases: Phases, data: Bytes, part: MicroBatch, take: Take) -> Pending[F32] | None:
        """See `Segment.start`; all is computed with the output."""
        if Phase.OUTPUT not in phases or len(part.x) > STREAM_TOKENS:
            return self.plain.start(phases, data, part, take)
        x = take(self)
        return self.launch(lambda: self._compute(data, x))

    def chained(self, data: Bytes, residual: Residual) -> ChainBlock:
        """See `Segment.chained`; raises TpiError, for a chain computes all neurons."""
        raise TpiError("neurons that are chosen by their gate are in no chain; run them block by block")

    def _compute(self, data: Bytes, x: Input) -> F32:
        found, count = self.kernels.ffn_gated(self.spec, data, x, self.least)
        self.node.note(count, self.neurons)
        return found


def open_gated(plan: NodePlan, held: Sequence[HeldBlock]) -> GatedNode | None:
    """What chooses neurons by their gate, by what the master sent of each layer; None if it sent nothing."""
    if not plan.gates:
        return None
    return GatedNode({one.layer: held[one.block].vectors["least"] for one in plan.gates})
