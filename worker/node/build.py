"""From a plan to a node that computes: segments and the window they come from, pages, collective."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from allreduce.base import Endpoints, GroupSpec, Peer, open_group
from scheduler.storage.disk import Disk
from scheduler.weights import Arrangement
from tpi.block import residual
from tpi.devices.abilities import check_model
from tpi.devices.base import Device
from tpi.devices.host import open_host
from tpi.finite import require_finite
from tpi.kernels.spec import ExpertsSpec
from tpi.net.messages import Assign
from tpi.progress import Progress, silent
from tpi.system.machine import usable_cores
from tpi.trace import OFF, Trace
from worker.demand.routed import RoutedBlock
from worker.equipment import AcceleratorSetup
from worker.node.block import Block
from worker.node.division import Division
from worker.node.loop import BlockLoop, unchecked
from worker.node.node import Node
from worker.node.order import Order, plain
from worker.node.segment import Segment
from worker.node.weights.opening import open_weights
from worker.plan.fit import Tables
from worker.plan.gates import refuse_gates
from worker.plan.node_plan import NodeBlock, NodePlan, node_plan
from worker.plan.residence import Residence, decide
from worker.shards.image import HeldBlock

if TYPE_CHECKING:
    from worker.neurons.gates.segment import GatedNode

_SPIN_US = 300  # about what a thread takes to fall asleep and wake up again
_PREFILL = 128  # tokens of the prefill step that the collective is chosen for


def build_node(
    assign: Assign,
    held: Sequence[HeldBlock],
    endpoints: Endpoints,
    progress: Progress = silent,
    tables: Tables | None = None,
    disk: Disk | None = None,
    host: Device | None = None,
    others: Sequence[tuple[Device, float]] = (),
    accelerator: AcceleratorSetup | None = None,
    order: Order = plain,
) -> Node:
    """Everything that runs `assign` on this node; `held` are `assign.blocks`, in that order.

    `progress` hears of every segment that is loaded to stay, and may raise to give up; `tables` are the master's;
    `disk` is read, and `host` computes, in place of the real one. `others` are more devices of this node, each with the
    share of every block that it computes, and keeps; the host does the rest. Or one `accelerator` keeps what fits, and
    has the rest pass through its memory. `order` is that of a step's tasks.

    Raises:
        WeightsError: if a shard image cannot be read, or with `verify_weights` is not what the plan says.
        PlanError: if the node's memory does not hold what the plan asks for, or the accelerator's what its options do.
        DeviceFullError: if another device's does not hold its share.
    """
    plan, devices = node_plan(assign), [host or open_host(), *(device for device, _ in others)]
    kernels, shares = devices[0].kernels, [1 - sum(share for _, share in others), *(share for _, share in others)]
    for device in (*devices[1:], *(accelerator.devices if accelerator else ())):
        check_model(device, plan.config)
        refuse_gates(plan, device.name)
    if plan.options.threads:
        kernels.set_threads(plan.options.threads)
    trace = Trace() if plan.options.trace else OFF
    offload = None
    if accelerator is not None:
        devices += accelerator.devices
        from worker.neurons.auto import decide_either
        from worker.pipelines.decide import decide_accelerator  # heavier than all that the host alone needs

        chosen = accelerator.decide or decide_accelerator
        offload = decide_either(plan, held, accelerator.machine, accelerator.options, tables, chosen)
    residence = decide(plan, held, kernels, tables, disk, shares, offload)
    spec = _group_spec(plan, kernels.threads())
    with ExitStack() as stack:  # what is open is closed if the rest fails, so that another plan finds the memory free
        group = stack.enter_context(closing(open_group(plan.collective, spec, endpoints)))
        gated = _gated(plan, held)
        opened = open_weights(stack, plan, residence, held, devices, trace, progress, gated)
        blocks = _blocks(plan, held, opened.weights.now)
        check = _finite if plan.options.verify_weights else unchecked
        division = opened.link.division if opened.link else _hosted(plan, residence, tables)
        loop = BlockLoop(blocks, opened.weights, group, kernels, trace, order, check, division)
        return Node(loop, residence, stack.pop_all(), opened.link, opened.fetched, opened.sparse, gated)


def _gated(plan: NodePlan, held: Sequence[HeldBlock]) -> "GatedNode | None":
    """What chooses neurons by their gate, if the master sent what for: no other run has this code in its memory."""
    if not plan.gates:
        return None
    from worker.neurons.gates.segment import open_gated

    return open_gated(plan, held)


def _hosted(plan: NodePlan, residence: Residence, tables: Tables | None) -> Division | None:
    """How a node without an accelerator divides steps, if its group computes batches; else as it likes."""
    if plan.options.batch is None:
        return None
    from worker.pipelines.group.hosted import hosted_pipeline

    return hosted_pipeline(plan, residence.budget, tables)


def _finite(partial: npt.NDArray[np.float32], name: str) -> None:
    require_finite(partial, f"this node's result of {name}", "it computes wrongly, or the model is damaged")


def _blocks(plan: NodePlan, held: Sequence[HeldBlock], arrangement: Arrangement[Segment]) -> list[Block]:
    """All blocks in order of use; those that are fetched know which is fetched next."""
    blocks: list[Block] = []
    following: RoutedBlock | None = None
    for block in reversed(plan.blocks):
        blocks.append(one := _block(plan, block, held, arrangement, following))
        following = one if isinstance(one, RoutedBlock) else following
    return blocks[::-1]


def _block(
    plan: NodePlan,
    block: NodeBlock,
    held: Sequence[HeldBlock],
    arrangement: Arrangement[Segment],
    following: RoutedBlock | None,
) -> Block:
    joins = plan.config.parallel and block.kind == "attention"
    after = residual(plan.config, block.kind, held[block.source].vectors)
    if block.number in arrangement.demanded:
        if plan.predictors:
            from worker.demand.records.blocks import StreamedBlock

            streamed = arrangement.demanded[block.number]
            assert isinstance(streamed, StreamedBlock)
            return streamed.block(block.number, block.name, after, joins)
        segment = arrangement.blocks[block.number][0]
        assert isinstance(segment.spec, ExpertsSpec)  # nothing else is fetched on demand
        return RoutedBlock(
            block.number, block.name, after, joins, spec=segment.spec, device=segment.device, following=following
        )
    return Block(block.number, block.name, after, joins)


def _group_spec(plan: NodePlan, threads: int) -> GroupSpec:
    peers = tuple(Peer(peer.rank, peer.name, peer.address, peer.key) for peer in plan.peers)
    hidden = plan.config.hidden
    return GroupSpec(
        rank=plan.rank,
        session=plan.session,
        epoch=plan.epoch,
        peers=peers,
        wire=plan.wire,
        timeout_s=plan.options.timeout_s,
        spin_us=_spin_us(plan, threads),
        payload_values=(hidden, _PREFILL * hidden),
    )


def _spin_us(plan: NodePlan, threads: int) -> int:
    """Waiting awake pays off where all nodes share a machine and each of their threads has a core.

    Over sockets it does not: the waiting thread then keeps ZeroMQ's own from the core that it needs to end the wait.
    """
    alone = plan.collective == "shared" and plan.size * threads <= usable_cores()
    return _SPIN_US if alone else 0
