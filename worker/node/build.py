"""Construction of a node from its plan: segments, memory window, KV pages and collective."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from allreduce.base import Endpoints
from scheduler.storage.disk import Disk
from tpi.devices.abilities import check_model
from tpi.devices.base import Device
from tpi.devices.host import open_host
from tpi.finite import require_finite
from tpi.net.messages import Assign
from tpi.progress import Progress, silent
from tpi.trace import OFF, Trace
from worker.equipment import AcceleratorSetup
from worker.node.block import open_blocks
from worker.node.group import join_group
from worker.node.loop import BlockLoop, unchecked
from worker.node.node import Node
from worker.node.weights import open_weights
from worker.node_plan import node_plan
from worker.plan.case import Case
from worker.plan.choose import choose
from worker.plan.fit import Tables
from worker.plan.residence import residence_of
from worker.shards.image import HeldBlock


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
    with ExitStack() as stack:  # after a failure it frees the memory for the next plan
        group, hops = join_group(stack, plan, kernels.threads(), endpoints)
        opened = open_weights(stack, plan, residence, held, devices, trace, progress)
        blocks = open_blocks(plan, held, opened.weights.now)
        check = _finite if plan.options.verify_weights else unchecked
        division = opened.link.division if opened.link else None
        if opened.link is None and plan.options.batch is not None:
            from worker.pipelines.hosted import hosted_pipeline

            division = hosted_pipeline(plan, plan.options.batch)
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


def _finite(partial: npt.NDArray[np.float32], name: str) -> None:
    require_finite(partial, f"this node's result of {name}", "the node computes incorrectly, or the model is damaged")
