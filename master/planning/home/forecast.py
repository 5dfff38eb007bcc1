"""The forecast of a layout, node by node: each computes its share on its own machine, and waits for the sums."""

from dataclasses import dataclass, replace

from master.planning.home.dealing import HomeModel
from master.planning.problem import layer_blocks
from scheduler.model.home.layouts import chosen, layouts, pure_layouts
from scheduler.model.home.stages import Layout, Stage
from scheduler.model.offload.choice import choose
from scheduler.model.offload.forecast import OffloadForecast, forecast
from scheduler.model.offload.memory import MemoryParts, peaks
from scheduler.model.offload.problem import Problem
from scheduler.model.offload.work import NodeWork, SegmentWork, TableWork, Workload
from tpi.config import RECURRENT
from tpi.errors import PlanError
from tpi.partition import Range

_OFF = 1.1  # a forecast that is slower than the search expects by this factor makes others worth a forecast
_COMPARED = 4  # layouts that are compared then


@dataclass(frozen=True)
class MemberForecast:
    """The forecast for one node: its units of a block by kind, its bytes in RAM and on disk, and its times."""

    rank: int
    units: dict[str, int]
    layers: Range
    request: Workload
    weight_bytes: int
    disk_bytes: int  # part of `weight_bytes` that is read for every token
    memory: MemoryParts
    decode: OffloadForecast
    prompt: OffloadForecast


@dataclass(frozen=True)
class HomeForecast:
    """All nodes of a layout, and the seconds of a token and of a prompt."""

    layout: Layout
    members: tuple[MemberForecast, ...]

    @property
    def token(self) -> float:
        """Seconds of a token: sums wait for the slowest node at every block, while disks read ahead."""
        slowest = sum(max(each.decode.decode.seconds for each in self.within(stage)) for stage in self.layout.stages)
        return max(self.layout.seconds, slowest + self.layout.hops + self.layout.turn)

    @property
    def disk(self) -> float:
        """Seconds of a token spent waiting for disks, in addition to all else."""
        return self.token - self.layout.compute - self.layout.exchange - self.layout.hops

    @property
    def ttft(self) -> float:
        """Seconds to the first token. The chunks of a prompt follow one another through several stages."""
        if len(self.layout.stages) > 1:
            return self.layout.prompt(self._prompt)
        return max(each.prompt.ttft for each in self.members) + self.layout.hops

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens per second."""
        if len(self.layout.stages) > 1:
            return self._prompt / self.ttft
        return min(each.prompt.prompt.rate for each in self.members)

    @property
    def _prompt(self) -> int:
        return self.members[0].request.prompt

    def within(self, stage: Stage) -> list[MemberForecast]:
        """Return the nodes of a stage."""
        return [each for each in self.members if each.rank in stage.split.members]


def best_forecast(model: HomeModel, drop: bool = True, several: bool = True) -> HomeForecast:
    """Return the forecast for the layout to use.

    The search does not know the memory for weights on their way from disk. If the forecast for its choice is slower
    than it expects, its next best layouts and the pure forms are compared by their forecasts.

    Args:
        model: the model and the home.
        drop: whether nodes may be left out.
        several: whether there may be several stages.

    Raises:
        PlanError: if no layout fits the nodes' memories.
    """
    found = layouts(model.staged, drop, several)
    use = chosen(found)
    if (best := _forecast(model, use)) is not None and best.token <= _OFF * use.seconds:
        return best
    pure = [each for each in pure_layouts(model.staged) if each is not None and (several or len(each.stages) == 1)]
    others = [_forecast(model, each) for each in (*found[:_COMPARED], *pure)]
    if not (fitting := [each for each in (best, *others) if each is not None]):
        return forecast_home(model, use)
    return min(fitting, key=lambda each: each.token)


def _forecast(model: HomeModel, layout: Layout) -> HomeForecast | None:
    try:
        return forecast_home(model, layout)
    except PlanError:
        return None


def forecast_home(model: HomeModel, layout: Layout) -> HomeForecast:
    """Return the forecast for `layout`.

    Raises:
        PlanError: if a node's memory cannot hold its part in any way.
    """
    known: dict[tuple[object, ...], MemberForecast] = {}
    members = []
    for stage in layout.stages:
        for position, rank in enumerate(stage.split.members):
            units = {kind: counts[position] for kind, counts in stage.split.units.items()}
            alike = (model.home.machines[rank], rank == 0, stage.first, *units.items())
            if alike not in known:
                known[alike] = _member(model, stage, rank, units)
            members.append(replace(known[alike], rank=rank))
    return HomeForecast(layout, tuple(sorted(members, key=lambda each: each.rank)))


def _member(model: HomeModel, stage: Stage, rank: int, units: dict[str, int]) -> MemberForecast:
    whole = model.whole
    work = _share(model, stage, units, rank == 0)
    machine = model.home.machines[rank]
    alone = Problem(work, machine, whole.request, whole.needs, whole.limits)
    tokens = (1, round(alone.step("prompt")[0].tokens))
    sums = [model.exchange(stage.split.members, count)[0] for count in tokens]
    decode, prompt = (replace(alone, exchange=seconds) for seconds in (min(sums), max(sums)))
    chosen = choose(decode).offload
    lying = zip(work.segments, chosen.residence, strict=True)
    return MemberForecast(
        rank=rank,
        units=units,
        layers=Range(stage.first, stage.last),
        request=model.request,
        weight_bytes=work.nbytes,
        disk_bytes=sum(segment.nbytes for segment, tier in lying if tier == "disk"),
        memory=peaks(work, chosen, alone.request, alone.needs, alone.chunk).host,
        decode=forecast(decode, chosen),
        prompt=forecast(prompt, chosen),
    )


def _share(model: HomeModel, stage: Stage, units: dict[str, int], master: bool) -> NodeWork:
    """Return the work of a node that holds `units` of every block of a stage; the `master` also computes the head."""
    shares = {each.kind: units[each.kind] / each.units for each in model.problem.kinds if each.kind in units}
    kinds = dict.fromkeys(RECURRENT, "heads") | {"attention": "heads", "ffn": "neurons", "experts": "experts"}
    held = layer_blocks(model.shape)[stage.first : stage.last]
    blocks = range(held[0].start, held[-1].stop)
    parts = {number: shares[kinds[model.shape.blocks[number].kind]] for number in blocks}
    segments = tuple(_cut(each, parts[each.block]) for each in model.whole.work.segments if each.block in blocks)
    table = model.whole.work.head if master else TableWork()
    return replace(model.whole.work, segments=segments, head=table)


def _cut(segment: SegmentWork, part: float) -> SegmentWork:
    return replace(
        segment,
        nbytes=round(segment.nbytes * part),
        weights=round(segment.weights * part),
        kv_token=round(segment.kv_token * part),
        pair=round(segment.pair * part),
    )
