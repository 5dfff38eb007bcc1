"""Batches whose keys and values are divided between an accelerator and RAM as a test says."""

from dataclasses import replace
from typing import Any

from master.deployment.deployment import Deployment
from scheduler.model.roofline.search import best_policy
from tpi.kernels.kv import page_bytes
from worker.node.node import Node
from worker.pipelines.accelerated import BatchAccelerated
from worker.plan.case import Candidate, Case
from worker.plan.choose import Choose
from worker.plan.modes.batch import BatchSettings, problem_of, with_policy

SMALL: dict[str, Any] = {"context": 64, "pool": 24, "chunk": 32}  # tokens, pages


def keep_heads(heads: int, attends_there: bool, weights: float = 0.0) -> Choose:
    """Return a planner with keys and values of `heads` heads and the share `weights` of weights on the accelerator.

    The accelerator attends for the other heads if `attends_there`, else the host does.
    """

    def decide(case: Case) -> Candidate[BatchSettings]:
        asked = problem_of(case)
        policy = best_policy(asked).policy
        chosen = replace(
            policy,
            attention_there=attends_there,
            kv_kept=heads / case.plan.kv_heads,
            weights_kept=weights,
            weights_on_disk=0.0,
        )
        return with_policy(case, asked, chosen)

    return decide


def dividing(deployment: Deployment, micro_batch: int = 3) -> BatchAccelerated:
    """Make a node compute in micro-batches of `micro_batch` sequences; return its accelerator."""
    link = deployment.node.link
    assert isinstance(link, BatchAccelerated)
    link.pipeline.schedule = replace(link.pipeline.schedule, micro_batch=micro_batch)
    return link


def check_sides(node: Node, limit: int) -> None:
    """Check that keys and values take the planned bytes on both sides, and the accelerator at most `limit` bytes."""
    link, plan = node.link, node.link._plan  # type: ignore[union-attr]
    assert isinstance(link, BatchAccelerated)
    each = page_bytes(1, 1, plan.config.head_dim, plan.options.kv_dtype)
    here = sum(array.nbytes for array in (*link.host_pages.keys.values(), *link.host_pages.values.values()))
    assert (
        here
        == node.budget.kv_bytes
        == plan.config.layers * (link.offload.host_kv_heads or 0) * node.budget.pages * each
    )
    pages = {id(pages): pages for pages in link._pages.values()}
    there = sum(array.nbytes for one in pages.values() for array in (*one.keys.values(), *one.values.values()))  # type: ignore[attr-defined]
    assert there == plan.config.layers * link.settings.card_kv_heads * node.budget.pages * each
    assert link.device.memory.used <= link.offload.memory_bytes <= limit
