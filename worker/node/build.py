"""From a plan to a node that computes: segments and the window they come from, pages, collective."""

from collections.abc import Sequence
from contextlib import ExitStack, closing, nullcontext

import numpy as np
import numpy.typing as npt

from allreduce.base import Endpoints, GroupSpec, Peer, open_group
from scheduler.storage.disk import Disk
from scheduler.weights import Hold, Weights
from scheduler.window.load import Verify
from scheduler.window.window import MemoryWindow, Resident, Window
from tpi.block import residual
from tpi.devices.base import Device
from tpi.devices.host import HostDevice, open_host
from tpi.finite import require_finite
from tpi.kv import KvPages
from tpi.net.messages import Assign
from tpi.progress import Progress, silent
from tpi.system.machine import usable_cores
from tpi.trace import OFF, NoTrace, Trace
from worker.node.block import Block
from worker.node.loop import BlockLoop, unchecked
from worker.node.node import Node
from worker.node.order import Order, plain
from worker.node.placed import Placed
from worker.node.segment import Segment, open_segment
from worker.plan.checksums import Checksums
from worker.plan.fit import Tables
from worker.plan.node_plan import NodeBlock, NodePlan, node_plan
from worker.plan.residence import Residence, decide
from worker.plan.segments import NodeSegment, per_block
from worker.shards.image import HeldBlock

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
    others: Sequence[tuple[Device, float]] = (),
    order: Order = plain,
) -> Node:
    """Everything that runs `assign` on this node; `held` are `assign.blocks`, in that order.

    `progress` hears of every segment that is loaded to stay, and may raise to give up; `tables` are the master's;
    `disk` is read, and `host` computes, in place of the real one. `others` are more devices of this node, each with the
    share of every block that it computes; the host does the rest. `order` is that of a step's tasks.

    Raises:
        WeightsError: if a shard image cannot be read, or with `verify_weights` is not what the plan says.
        PlanError: if the node's memory does not hold what the plan asks for.
        DeviceFullError: if another device's does not hold its share.
    """
    plan, devices = node_plan(assign), [host or open_host(), *(device for device, _ in others)]
    kernels, shares = devices[0].kernels, [1 - sum(share for _, share in others), *(share for _, share in others)]
    if plan.options.threads:
        kernels.set_threads(plan.options.threads)
    trace = Trace() if plan.options.trace else OFF
    residence = decide(plan, held, kernels, tables, disk, shares)
    verify = Checksums(residence.segments, held) if plan.options.verify_weights else None
    spec = _group_spec(plan, kernels.threads())
    with ExitStack() as stack:  # what is open is closed if the rest fails, so that another plan finds the memory free
        group = stack.enter_context(closing(open_group(plan.collective, spec, endpoints)))
        window = stack.enter_context(closing(_window(plan, residence, verify, trace, progress)))
        placed = stack.enter_context(closing(Placed()))
        pages = [_pages(plan, residence, number, device, placed) for number, device in enumerate(devices)]
        segments = [_segment(plan, segment, held, pages, devices) for segment in residence.segments]
        holds = _placed_holds(residence, devices, held, placed, verify) if residence.placed else None
        weights = _weights(residence, window, segments, holds)
        blocks = [_block(plan, block, held) for block in plan.blocks]
        check = _finite if plan.options.verify_weights else unchecked
        loop = BlockLoop(blocks, weights, group, kernels, trace, order, check)
        return Node(loop, residence, stack.pop_all())


def _finite(partial: npt.NDArray[np.float32], name: str) -> None:
    require_finite(partial, f"this node's result of {name}", "it computes wrongly, or the model is damaged")


def _window(plan: NodePlan, residence: Residence, verify: Verify | None, trace: NoTrace, progress: Progress) -> Window:
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
    residence: Residence, window: Window, segments: Sequence[Segment], holds: Sequence[Hold] | None
) -> Weights[Segment]:
    """Every block's segments, each with its hold: the window's, unless they are placed on devices."""
    holds = holds or [window.hold(number) for number in range(len(segments))]
    blocks = per_block(residence.segments)
    return Weights(window, [[(segments[number], holds[number]) for number in block] for block in blocks])


def _placed_holds(
    residence: Residence,
    devices: Sequence[Device],
    held: Sequence[HeldBlock],
    placed: Placed,
    verify: Verify | None,
) -> list[Hold]:
    """Load every segment to its device, where it stays."""
    holds: list[Hold] = []
    for number, segment in enumerate(residence.segments):
        data = placed.load(devices[segment.device], segment.pieces(held), residence.disk)
        if verify:
            verify(number, data)
        holds.append(nullcontext(data))
    return holds


def _segment(
    plan: NodePlan,
    segment: NodeSegment,
    held: Sequence[HeldBlock],
    pages: Sequence[KvPages],
    devices: Sequence[Device],
) -> Segment:
    block, runs = segment.block, {run.name: (run.layout, run.units) for run in segment.runs}
    vectors = held[block.source].vectors
    return open_segment(devices[segment.device], plan.config, block.layer, runs, vectors, pages[segment.device])


def _block(plan: NodePlan, block: NodeBlock, held: Sequence[HeldBlock]) -> Block:
    return Block(block.number, block.name, residual(plan.config, block.kind, held[block.source].vectors))


def _pages(plan: NodePlan, residence: Residence, number: int, device: Device, placed: Placed) -> KvPages:
    """Room for the keys and values of the heads that this device computes."""
    config, pages = plan.config, residence.budget.pages
    if not residence.placed:
        return KvPages.allocate(config.layers, pages, plan.kv_heads, config.head_dim, plan.options.kv_dtype)
    own = [run for segment in residence.segments if segment.device == number for run in segment.runs]
    widest = max((run for run in own if run.name == "kv"), key=lambda run: len(run.units))
    heads = len(widest.units.scaled(widest.layout.width // config.head_dim, config.kv_heads))
    return placed.pages(device, plan, pages, heads)


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
    """Waiting awake pays off where all nodes share a machine and each of their threads has a core.

    Over sockets it does not: the waiting thread then keeps ZeroMQ's own from the core that it needs to end the wait.
    """
    alone = plan.collective == "shared" and plan.size * threads <= usable_cores()
    return _SPIN_US if alone else 0
