"""Stages: the division of layers over nodes. Each node of a stage holds its share of every layer of the stage."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from allreduce.stages import MOST_STAGES
from master.deployment.planner import Split, deal_shards, units_of
from tpi.errors import PlanError, UsageError
from tpi.net.messages import StagePlan
from tpi.pack.reader import Pack
from tpi.partition import Range, Shard, deal

ONE = "1"  # accepted by `--stages`: all nodes are in one stage
AUTO = "auto"  # accepted by `--stages`: the stages that were planned with the shares, else one
_PART = re.compile(r"(\d+)(?:-(\d+))?:(.+)")


@dataclass(frozen=True)
class Stage:
    """Consecutive layers, and the nodes that hold them together, in ascending order of rank.

    Each node holds its part of each of the layers. `shards` has one entry for each of `ranks`.
    """

    layers: Range
    ranks: tuple[int, ...]
    shards: tuple[Shard, ...]


def one_stage(pack: Pack, shares: Sequence[float] | Split) -> tuple[Stage, ...]:
    """Return the stage in which all nodes hold their share of every layer; errors as for `deal_stages`."""
    nodes = tuple(range(len(Split.of(shares).heads)))
    return deal_stages(pack, [StagePlan(0, pack.config.layers, nodes)], shares)


def deal_stages(pack: Pack, layout: Sequence[StagePlan], shares: Sequence[float] | Split) -> tuple[Stage, ...]:
    """Deal the units of each stage's layers over its nodes in proportion to `shares`, which has one for each rank.

    Raises:
        PlanError: if a stage has more nodes with a positive share than units of some kind.
    """
    split, units = Split.of(shares), units_of(pack)
    return tuple(
        Stage(Range(one.first, one.last), one.ranks, tuple(deal_shards(pack.config, units, split.among(one.ranks))))
        for one in layout
    )


def together(stages: Sequence[Stage], nodes: int) -> bool:
    """Return True if all of `nodes` nodes are in one stage."""
    return len(stages[0].ranks) == nodes


def lay_out(asked: str, names: Sequence[str], cuts: Sequence[int], shares: Sequence[float] | Split) -> list[StagePlan]:
    """Return the layers and nodes of each stage.

    Args:
        asked: the value of `--stages`: `auto`, a number of stages, or a layout such as `0-9:master,10-21:desk+attic`.
        names: the names of the nodes by rank, the master's first.
        cuts: the layers at which a stage may begin, and the number of layers (`tpi.config.ModelConfig.stage_cuts`).
        shares: each node's share. Stages get layers in proportion to the shares of their nodes.

    Raises:
        UsageError: if `asked` cannot be read, names an unknown node or one twice, or lacks a layer.
        PlanError: if the model cannot be cut into so many stages.
    """
    if (count := stages_in(asked)) > MOST_STAGES:
        raise UsageError(f"--stages {asked} asks for {count} stages; give at most {MOST_STAGES}")
    if asked == AUTO and Split.of(shares).stages:
        return list(Split.of(shares).stages)
    if asked in (ONE, AUTO):
        return [StagePlan(0, cuts[-1], tuple(range(len(names))))]
    weights = Split.of(shares).weights()
    if asked.isdecimal():
        most = sum(weight > 0 for weight in weights)
        if not 1 <= int(asked) <= most:
            raise UsageError(
                f"--stages {asked}: give at least 1, and at most {most}, the number of nodes with a share above 0, "
                "this machine included"
            )
        return in_rank_order(int(asked), cuts, shares)
    stages = [_stage(part.strip(), names) for part in asked.split(",")]
    _check(asked, stages, names, cuts[-1], weights)
    return stages


def in_rank_order(count: int, cuts: Sequence[int], shares: Sequence[float] | Split) -> list[StagePlan]:
    """Return `count` stages with about the same number of nodes, in rank order; fewer if fewer nodes have a share.

    A stage ends at the possible cut that is nearest to its part of the layers.

    Raises:
        PlanError: if the model cannot be cut into so many stages.
    """
    weights = Split.of(shares).weights()
    holders = [rank for rank, weight in enumerate(weights) if weight > 0]
    count = max(1, min(count, len(holders)))
    if count > len(cuts) - 1:
        raise PlanError(
            f"this model can be cut into at most {len(cuts) - 1} stages, too few for {count}; give a smaller --stages"
        )
    groups = [tuple(holders[part.first : part.last]) for part in deal(len(holders), [1.0] * count)]
    parts = deal(cuts[-1], [sum(weights[rank] for rank in group) for group in groups])
    ends = _nearest(cuts, [part.last for part in parts[:-1]])
    bounds = pairwise([0, *ends, cuts[-1]])
    return [StagePlan(first, last, group) for (first, last), group in zip(bounds, groups, strict=True)]


def _nearest(cuts: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """Return one possible cut for each of the `wanted` layer numbers, in ascending order and without repetition.

    Each is the cut nearest to the wanted number that comes after the previous one and leaves enough cuts for the
    others.
    """
    at, found = 0, list[int]()
    for left, want in zip(range(len(wanted), 0, -1), wanted, strict=True):
        at = min(range(at + 1, len(cuts) - left), key=lambda one: abs(cuts[one] - want))
        found.append(cuts[at])
    return found


def stages_in(asked: str) -> int:
    """Return the number of stages that the value of `--stages` asks for."""
    return int(asked) if asked.isdecimal() else len(asked.split(","))


def _stage(part: str, names: Sequence[str]) -> StagePlan:
    if not (found := _PART.fullmatch(part)):
        raise UsageError(
            f"--stages {part!r} is neither auto nor a number of stages nor layers and their nodes; write for example "
            "--stages 2, or --stages 0-9:master,10-21:desk+attic"
        )
    first, last = int(found[1]), int(found[2] or found[1])
    ranks = [_rank(name.strip(), names) for name in found[3].split("+")]
    return StagePlan(first, last + 1, tuple(sorted(ranks)))


def _rank(name: str, names: Sequence[str]) -> int:
    if name not in names:
        raise UsageError(f"--stages names the node {name!r}, but the nodes are {', '.join(names)}")
    return names.index(name)


def _check(
    asked: str, stages: Sequence[StagePlan], names: Sequence[str], layers: int, weights: Sequence[float]
) -> None:
    ends = [0, *(stage.last for stage in stages)]
    if [stage.first for stage in stages] != ends[:-1] or sorted(set(ends)) != ends or ends[-1] != layers:
        raise UsageError(f"--stages {asked} must name the layers 0 to {layers - 1} in order, each once")
    ranks = [rank for stage in stages for rank in stage.ranks]
    shared = {rank for stage in stages if len(stage.ranks) > 1 for rank in stage.ranks}
    if twice := sorted(names[rank] for rank in shared if ranks.count(rank) > 1):
        raise UsageError(
            f"--stages {asked} names {', '.join(twice)} twice; a node of several stages must be alone in each of them"
        )
    if joined := sorted(names[one.ranks[0]] for one, after in pairwise(stages) if one.ranks == after.ranks):
        raise UsageError(f"--stages {asked} gives {', '.join(joined)} two stages in a row; make them one stage")
    if idle := [names[rank] for rank in ranks if not weights[rank] > 0]:
        raise UsageError(f"--stages {asked} names {', '.join(idle)}, whose share is 0; remove it, or change --split")
