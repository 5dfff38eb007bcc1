"""Does a node's part of a plan fit into its memories? Asked before any weight moves."""

from dataclasses import replace

from tpi.net.fields import Card
from worker.plan.fit import Tables, fit
from worker.plan.node_plan import NodePlan


def check_memory(plan: NodePlan, tables: Tables | None = None, card: Card | None = None) -> None:
    """Refuse what a node with this accelerator, or none, cannot hold; ask of another's plan with `limited` options.

    Raises:
        PlanError: if it does not fit; names the smallest setting that would do.
    """
    if card is None:
        fit(plan, tables)
        return
    from scheduler.model.machine import LAPTOP, laptop_gpu
    from worker.pipelines.decide import check_accelerator

    sizes = (card.memory, *card.more)
    there, *more = (replace(laptop_gpu(), memory=size) for size in sizes)  # what fits does not depend on speeds
    check_accelerator(plan, replace(LAPTOP, accelerator=there, more=tuple(more)), card.options, tables)
