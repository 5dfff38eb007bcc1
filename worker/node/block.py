"""The blocks of a node: the properties of a block that the block loop needs and that all its segments share."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler.weights import Arrangement, Wanted
from tpi.block import Joining, joining, residual
from tpi.devices.base import Device
from tpi.kernels.constants import STREAM_TOKENS
from tpi.kernels.spec import ExpertsSpec, Residual, Routing
from worker.node.microbatch import MicroBatch
from worker.node.segment import Segment
from worker.node_plan import NodeBlock, NodePlan
from worker.shards.image import HeldBlock


@dataclass(frozen=True)
class Block:
    """The attention or feed-forward half of a layer."""

    number: int  # in order of use
    name: str
    residual: Residual
    sums_with_next: Joining = ""  # how its partial result joins that of the next block, if one sum serves both

    def wanted(self, parts: Sequence[MicroBatch]) -> Wanted:
        """Return the units that the micro-batches `parts` need. None means all units, since the block is dense."""
        return None

    def predicted_units(self, parts: Sequence[MicroBatch]) -> tuple[int, Wanted] | None:
        """Return the number of a later block and the units that it will probably need, so that they are prefetched.

        Return None if no units are predicted. The block loop calls this when all weights of this block are in memory.
        """
        return None


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


def open_blocks(plan: NodePlan, held: Sequence[HeldBlock], arrangement: Arrangement[Segment]) -> list[Block]:
    """Return all blocks in order of use.

    Each block of routed experts gets the next one of its pass, to prefetch for it.
    """
    blocks: list[Block] = []
    following: RoutedBlock | None = None
    starts = {each.blocks.start for each in plan.passes}
    for block in reversed(plan.blocks):
        blocks.append(one := _block(plan, block, held, arrangement, following))
        following = one if isinstance(one, RoutedBlock) else following
        if block.number in starts:
            following = None
    return blocks[::-1]


def _block(
    plan: NodePlan,
    block: NodeBlock,
    held: Sequence[HeldBlock],
    arrangement: Arrangement[Segment],
    following: RoutedBlock | None,
) -> Block:
    sums_with_next = joining(plan.config, block.kind)
    after = residual(plan.config, block.kind, held[block.source].vectors, block.layer)
    if block.number in arrangement.demanded:
        if plan.predictors:
            from worker.demand.records.blocks import DemandBlock

            streamed = arrangement.demanded[block.number]
            assert isinstance(streamed, DemandBlock)
            return streamed.block(block.number, block.name, after, sums_with_next)
        segment = arrangement.blocks[block.number][0]
        assert isinstance(segment.spec, ExpertsSpec)  # without predictors only experts are loaded on demand
        return RoutedBlock(
            block.number,
            block.name,
            after,
            sums_with_next,
            spec=segment.spec,
            device=segment.device,
            following=following,
        )
    return Block(block.number, block.name, after, sums_with_next)
