"""Construction of a node from its plan: segments, memory window, KV pages and collective."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from allreduce.base import Endpoints, GroupSpec, Peer, open_group
from allreduce.connections import Connections
from allreduce.hops import Hops, sums_lane
from scheduler.storage.disk import Disk
from scheduler.weights import Arrangement
from tpi.block import joining, residual
from tpi.devices.abilities import check_model
from tpi.devices.base import Device
from tpi.devices.host import open_host
from tpi.finite import require_finite
from tpi.kernels.spec import ExpertsSpec
from tpi.net.messages import Assign
from tpi.progress import Progress, silent
from tpi.system.machine import usable_cores
from tpi.trace import OFF, Trace
from worker.equipment import AcceleratorSetup
from worker.node.block import Block
from worker.node.division import Division
from worker.node.loop import BlockLoop, unchecked
from worker.node.node import Node
from worker.node.routed import RoutedBlock
from worker.node.segment import Segment
from worker.node.weights.opening import open_weights
from worker.node_plan import NodeBlock, NodePlan, node_plan
from worker.plan.case import Case
from worker.plan.choose import choose
from worker.plan.fit import Tables
from worker.plan.residence import residence_of
from worker.shards.image import HeldBlock

_SPIN_US = 300  # microseconds; about the time that a thread needs to fall asleep and wake up again
_PREFILL = 128  # tokens of the prefill step for which the collective is tuned


def build_node(
    assign: Assign,
    held: Sequence[HeldBlock],
    endpoints: Endpoints,
    progress: Progress = silent,
    tables: Tables | None = None,
    disk: Disk | None = None,
    host: Device | None = None,
    accelerator: AcceleratorSetup | None = None,
) -> Node:
    """Build the node that runs `assign`.

    Args:
        assign: the plan of this node.
        held: the images of `assign.blocks`, in the same order.
        endpoints: the sockets of the node, for the collective.
        progress: called for each resident segment that is loaded; may raise to cancel.
        tables: the embedding and the head; on the master only.
        disk: replaces the real disk.
        host: replaces the real host device.
        accelerator: the node's accelerators, with the options for their use; None without any.

    Raises:
        WeightsError: if a shard image cannot be read, or, with `verify_weights`, differs from its hashes.
        PlanError: if the plan needs more memory than the node has, or if the options of the accelerator need more
            memory than the accelerator has.
    """
    plan, own = node_plan(assign), host or open_host()
    kernels, devices = own.kernels, [own, *(accelerator.devices if accelerator else ())]
    for device in devices[1:]:
        check_model(device, plan.config)
    if plan.options.threads:
        kernels.set_threads(plan.options.threads)
    trace = Trace() if plan.options.trace else OFF
    case = Case(plan, tables=tables, held=held, kernels=kernels, disk=disk)
    if accelerator is not None:
        case = replace(case, machine=accelerator.machine, options=accelerator.options)
    residence = residence_of(case, ((accelerator and accelerator.choose) or choose)(case))
    spec = _group_spec(plan, kernels.threads())
    with ExitStack() as stack:  # after a failure it frees the memory for the next plan
        hops = _hops(stack, plan, spec, endpoints)
        if hops is not None:
            endpoints = replace(endpoints, connections=hops.connections)
        group = stack.enter_context(closing(open_group(plan.collective, _within_stage(plan, spec), endpoints)))
        opened = open_weights(stack, plan, residence, held, devices, trace, progress)
        blocks = _blocks(plan, held, opened.weights.now)
        check = _finite if plan.options.verify_weights else unchecked
        division = opened.link.division if opened.link else _hosted(plan)
        loop = BlockLoop(blocks, opened.weights, group, kernels, trace, check, division)
        return Node(
            loop,
            residence,
            stack.pop_all(),
            opened.link,
            opened.fetched,
            opened.sparse,
            any(plan.config.recurrent),
            hops,
            plan.passes,
        )


def _hosted(plan: NodePlan) -> Division | None:
    """Return the division of steps for a node without an accelerator.

    None (two halves) if the plan sets no batch size.
    """
    if plan.options.batch is None:
        return None
    from worker.pipelines.group.hosted import hosted_pipeline

    return hosted_pipeline(plan)


def _finite(partial: npt.NDArray[np.float32], name: str) -> None:
    require_finite(partial, f"this node's result of {name}", "the node computes incorrectly, or the model is damaged")


def _blocks(plan: NodePlan, held: Sequence[HeldBlock], arrangement: Arrangement[Segment]) -> list[Block]:
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


def _hops(stack: ExitStack, plan: NodePlan, spec: GroupSpec, endpoints: Endpoints) -> Hops | None:
    if plan.whole:
        return None
    connections = stack.enter_context(closing(Connections(spec, endpoints)))
    return Hops(connections, [stage.ranks for stage in plan.stages], plan.config.hidden, plan.wire)


def _within_stage(plan: NodePlan, spec: GroupSpec) -> GroupSpec:
    """Return the group of the nodes of this node's stage, derived from `spec`, the group of all nodes."""
    peers = tuple(spec.peers[rank] for rank in plan.group)
    return replace(spec, rank=plan.group.index(plan.rank), peers=peers, lane=sums_lane(plan.passes[0].stage or 0))


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
    """Return how long a thread spins before it sleeps while it waits for a sum, in microseconds.

    Spinning pays if all nodes are on one machine and each of their threads has a core. Over sockets it does not: the
    spinning thread would take the core that ZeroMQ's I/O thread needs.
    """
    alone = plan.collective == "shared" and len(plan.group) * threads <= usable_cores()
    return _SPIN_US if alone else 0
