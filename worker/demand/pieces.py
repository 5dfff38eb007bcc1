"""A node's pieces with routed experts separate from the rest, and the experts' description for the cost model."""

from collections.abc import Iterator
from dataclasses import replace

from scheduler.model.experts.forecast import ExpertWork
from worker.demand.plan import always_of, routed_of
from worker.plan.node_plan import NodePlan
from worker.plan.segments import NodeSegment, cut_pieces


def expert_work(plan: NodePlan) -> ExpertWork | None:
    """Describe the node's routed experts for the cost model; return None if it has none."""
    mixture = plan.config.mixture
    sizes = [segment for _, segment in routed_of(plan, mixture.experts)] if mixture else []
    if mixture is None or not sizes:
        return None
    largest = max(sizes, key=lambda segment: segment.nbytes)
    (run,) = largest.runs
    blocks = [block for block in plan.blocks if block.kind == "experts"]
    own = -(-len(sizes) // len(blocks))
    shared = max(sum(run.nbytes for run in block.runs if run.name == "shared") for block in blocks)
    return ExpertWork(
        blocks=len(blocks),
        experts=own,
        used=max(1, round(mixture.used * own / mixture.experts)),
        nbytes=largest.nbytes,
        weights=len(run.units) * run.layout.width * run.layout.hidden * len(run.layout.parts),
        shared=shared,
    )


def pieces_with_experts(plan: NodePlan) -> Iterator[NodeSegment]:
    """Yield all pieces in order of use, with routed experts in pieces of their own."""
    block = None
    for piece in cut_pieces(plan):
        routed = tuple(run for run in piece.runs if run.name == "neuron")
        begins, block = piece.block is not block, piece.block
        if block.kind != "experts":
            yield replace(piece, device=1)
            continue
        if begins and block.runs[0].name == "shared":
            yield replace(always_of(block), device=1)
        if routed:
            yield NodeSegment(block, routed, 1)
