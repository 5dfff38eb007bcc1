"""From a plan to a node that computes: blocks, weight window, KV storage, collective."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial

from allreduce.base import Endpoints, GroupSpec, Peer, open_group
from scheduler.budget import Budget, enough
from scheduler.disk import Disk
from scheduler.load import Verify
from scheduler.placement import Placement
from scheduler.tune import DiskSpeed, disk_for
from scheduler.window import Extent, MemoryWindow, Resident, Window
from tpi.block import Block, attention_block, ffn_block
from tpi.config import default_cache
from tpi.devices.host import HostDevice, open_host
from tpi.kernels import Kernels
from tpi.kv import PagedKV
from tpi.machine import usable_cores
from tpi.messages import Assign
from tpi.partition import Range
from tpi.progress import Progress, silent
from tpi.trace import OFF, Off, Trace
from worker.assigned import layouts, local_shard
from worker.checksums import Checksums
from worker.fit import Tables, fit, need
from worker.image import HeldBlock
from worker.node import Node
from worker.shard import Shard
from worker.speeds import speeds_of
from worker.tiles import extents_of, ffn_tiles, joined, whole_blocks

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

    `progress` hears of every block that is loaded to stay, and may raise to give up; `tables` are the master's; `disk`
    is read, and `host` computes, in place of the real one.

    Raises:
        WeightsError: if a shard image cannot be read, or with `verify_weights` is not what the plan says.
        PlanError: if the node's memory does not hold what the plan asks for.
    """
    kernels = (host or open_host()).kernels
    if assign.options.threads:
        kernels.set_threads(assign.options.threads)
    trace = Trace() if assign.options.trace else OFF
    tiles = ffn_tiles(assign)
    extents = extents_of(assign, held, tiles)
    budget, speed = _budget(assign, tables, extents, kernels if disk is None else None)
    placement, memory_for = budget.placement, _enough(assign, tables, extents)
    if not placement.streamed_bytes:
        tiles = whole_blocks(assign)
        extents = extents_of(assign, held, tiles)
    else:
        tiles, numbers = joined(tiles, placement.resident)
        extents = extents_of(assign, held, tiles)
        placement = placement.renumbered(numbers, [extent.slot_bytes for extent in extents])
    verify = Checksums(assign, held, tiles) if assign.options.verify_weights else None
    spec = _group_spec(assign, kernels.threads())
    with ExitStack() as stack:  # what is open is closed if the rest fails, so that another plan finds the memory free
        group = stack.enter_context(closing(open_group(assign.collective, spec, endpoints)))
        reader = disk or speed.open(_smallest(extents))
        window = stack.enter_context(closing(_window(assign, extents, placement, reader, verify, trace, progress)))
        shard = Shard(list(_blocks(assign, held, tiles)), window, group, _kv(assign, budget), kernels, trace)
        node = Node(shard, budget, sum(extent.nbytes for extent in extents), memory_for)
        stack.pop_all()
    return node


def _enough(assign: Assign, tables: Tables | None, extents: Sequence[Extent]) -> Callable[[int], int]:
    """What `--memory` gives blocks so many bytes (`scheduler.budget.enough`), for the verdict."""
    wanted = need(assign, tables, [extent.slot_bytes for extent in extents])
    return partial(enough, wanted, chunk=assign.options.prefill_tokens)


def _budget(
    assign: Assign, tables: Tables | None, extents: Sequence[Extent], kernels: Kernels | None
) -> tuple[Budget, DiskSpeed]:
    """What fits, and how to read the disk; if blocks are streamed from it, speeds are measured (with `kernels`)."""
    sizes = [extent.slot_bytes for extent in extents]
    budget = fit(assign, tables, sizes)
    if kernels is None or not budget.placement.streamed_bytes:
        return budget, DiskSpeed()
    disk = disk_for(sorted({extent.path for extent in extents}), default_cache())
    if disk.bytes_per_second:
        budget = fit(assign, tables, sizes, speeds_of(assign, disk, _smallest(extents), budget.used, kernels))
    return budget, disk


def _smallest(extents: Sequence[Extent]) -> int:
    """Bytes of the smallest block that there is anything of."""
    return min((extent.slot_bytes for extent in extents if extent.nbytes), default=1 << 30)


def _window(
    assign: Assign,
    extents: Sequence[Extent],
    placement: Placement,
    disk: Disk,
    verify: Verify | None,
    trace: Off,
    progress: Progress,
) -> Window:
    if assign.options.scheduler == "resident" or not placement.streamed_bytes:
        return Resident(extents, disk, verify, progress)
    window = MemoryWindow(extents, placement, disk, verify, trace)
    try:
        window.fill(progress)
    except BaseException:
        window.close()
        raise
    return window


def _blocks(assign: Assign, held: Sequence[HeldBlock], tiles: Sequence[Sequence[Range]]) -> Iterator[Block]:
    for layer, plan in enumerate(assign.layers):
        shard, attention = local_shard(assign, layer), layouts(assign, plan.attention)
        vectors = held[plan.attention].vectors
        yield attention_block(assign.config, layer, attention["query"], attention["kv"], vectors, shard)
        neuron = layouts(assign, plan.ffn)["neuron"]
        for tile in tiles[layer]:
            part = replace(shard, ffn=tile)
            block = ffn_block(assign.config, layer, neuron, held[plan.ffn].vectors, part)
            yield replace(block, complete=tile.last == shard.ffn.last)


def _kv(assign: Assign, budget: Budget) -> PagedKV:
    config, shard = assign.config, local_shard(assign, 0)
    width = layouts(assign, assign.layers[0].attention)["kv"].width
    heads = len(shard.kv.scaled(width // config.head_dim, config.kv_heads))
    return PagedKV.allocate(config.layers, budget.kv_blocks, heads, config.head_dim, assign.options.kv_dtype)


def _group_spec(assign: Assign, threads: int) -> GroupSpec:
    peers = tuple(Peer(peer.rank, peer.name, peer.address) for peer in assign.peers)
    hidden = assign.config.hidden
    return GroupSpec(
        rank=assign.rank,
        session=assign.session,
        epoch=assign.epoch,
        peers=peers,
        wire=assign.wire,
        timeout_s=assign.options.timeout_s,
        spin_us=_spin_us(assign, threads),
        payload_values=(hidden, _PREFILL * hidden),
    )


def _spin_us(assign: Assign, threads: int) -> int:
    """Waiting awake pays off where all members share a machine and each of their threads has a core.

    Over sockets it does not: the waiting thread then keeps ZeroMQ's own from the core that it needs to end the wait.
    """
    alone = assign.collective == "shared" and assign.size * threads <= usable_cores()
    return _SPIN_US if alone else 0
