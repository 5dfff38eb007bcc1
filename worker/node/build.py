"""From a plan to a node that computes: segments and the window they come from, pages, collective."""

from collections.abc import Sequence
from contextlib import ExitStack, closing

import numpy as np
import numpy.typing as npt

from allreduce.base import Endpoints, GroupSpec, Peer, open_group
from scheduler.disk import Disk
from scheduler.load import Verify
from scheduler.weights import Weights
from scheduler.window import MemoryWindow, Resident, Window
from tpi.block import residual
from tpi.devices.host import HostDevice, open_host
from tpi.finite import require_finite
from tpi.kernels import Kernels
from tpi.kv import PagedKV
from tpi.machine import usable_cores
from tpi.messages import Assign
from tpi.progress import Progress, silent
from tpi.trace import OFF, Off, Trace
from worker.image import HeldBlock
from worker.node.block import Block, Segment, open_segment
from worker.node.loop import BlockLoop, unchecked
from worker.node.node import Node
from worker.plan.checksums import Checksums
from worker.plan.fit import Tables
from worker.plan.node_plan import NodeBlock, NodePlan, node_plan
from worker.plan.residence import Residence, decide
from worker.plan.segments import NodeSegment, per_block

_SPIN_US = 300  # about what a thread takes to fall asleep and wake up again
_PREFILL = 128  # tokens of the prefill step that the collective is chosen for


def build_node(
    assign: Assign,
    held: Sequence[HeldBlock],
    endpoints: Endpoints,
    progress: Progress = silent,
    tables: Tables | None = None,
    disk: Disk | None = None,
    host: HostDevice | None = None,
) -> Node:
    """Everything that runs `assign` on this node; `held` are `assign.blocks`, in that order.

    `progress` hears of every segment that is loaded to stay, and may raise to give up; `tables` are the master's;
    `disk` is read, and `host` computes, in place of the real one.

    Raises:
        WeightsError: if a shard image cannot be read, or with `verify_weights` is not what the plan says.
        PlanError: if the node's memory does not hold what the plan asks for.
    """
    plan, kernels = node_plan(assign), (host or open_host()).kernels
    if plan.options.threads:
        kernels.set_threads(plan.options.threads)
    trace = Trace() if plan.options.trace else OFF
    residence = decide(plan, held, kernels, tables, disk)
    verify = Checksums(residence.segments, held) if plan.options.verify_weights else None
    spec = _group_spec(plan, kernels.threads())
    with ExitStack() as stack:  # what is open is closed if the rest fails, so that another plan finds the memory free
        group = stack.enter_context(closing(open_group(plan.collective, spec, endpoints)))
        window = stack.enter_context(closing(_window(plan, residence, verify, trace, progress)))
        pages = _pages(plan, residence.budget.kv_blocks)
        weights = _weights(plan, residence, window, held, pages, kernels)
        blocks = [_block(plan, block, held) for block in plan.blocks]
        check = _finite if plan.options.verify_weights else unchecked
        node = Node(BlockLoop(blocks, weights, group, kernels, trace, check=check), pages, residence)
        stack.pop_all()
    return node


def _finite(partial: npt.NDArray[np.float32], name: str) -> None:
    require_finite(partial, f"this node's result of {name}", "it computes wrongly, or the model is damaged")


def _window(plan: NodePlan, residence: Residence, verify: Verify | None, trace: Off, progress: Progress) -> Window:
    extents, placement = residence.extents, residence.placement
    if plan.options.scheduler == "resident" or not placement.streamed_bytes:
        return Resident(extents, residence.disk, verify, progress)
    window = MemoryWindow(extents, placement, residence.disk, verify, trace)
    try:
        window.fill(progress)
    except BaseException:
        window.close()
        raise
    return window


def _weights(
    plan: NodePlan,
    residence: Residence,
    window: Window,
    held: Sequence[HeldBlock],
    pages: PagedKV,
    kernels: Kernels,
) -> Weights[Segment]:
    segments = [_segment(plan, segment, held, pages, kernels) for segment in residence.segments]
    blocks = [[(segments[number], window.hold(number)) for number in part] for part in per_block(residence.segments)]
    return Weights(window, blocks)


def _segment(
    plan: NodePlan, segment: NodeSegment, held: Sequence[HeldBlock], pages: PagedKV, kernels: Kernels
) -> Segment:
    block, runs = segment.block, {run.name: (run.layout, run.units) for run in segment.runs}
    return open_segment(kernels, plan.config, block.layer, runs, held[block.source].vectors, pages)


def _block(plan: NodePlan, block: NodeBlock, held: Sequence[HeldBlock]) -> Block:
    return Block(block.number, block.name, residual(plan.config, block.kind, held[block.source].vectors))


def _pages(plan: NodePlan, pages: int) -> PagedKV:
    return PagedKV.allocate(plan.config.layers, pages, plan.kv_heads, plan.config.head_dim, plan.options.kv_dtype)


def _group_spec(plan: NodePlan, threads: int) -> GroupSpec:
    peers = tuple(Peer(peer.rank, peer.name, peer.address) for peer in plan.peers)
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
    """Waiting awake pays off where all members share a machine and each of their threads has a core.

    Over sockets it does not: the waiting thread then keeps ZeroMQ's own from the core that it needs to end the wait.
    """
    alone = plan.collective == "shared" and plan.size * threads <= usable_cores()
    return _SPIN_US if alone else 0
