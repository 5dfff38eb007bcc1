"""The forecast of a layout, node by node: each computes its share on its own machine, and waits for the sums."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from master.deployment.stages import lay_out
from master.planning.home.dealing import HomeModel
from master.planning.problem import layer_blocks
from scheduler.model.home.layouts import chosen, evaluate, layouts, pure_layouts
from scheduler.model.home.stages import Layout, Stage
from scheduler.model.offload.choice import choose
from scheduler.model.offload.forecast import OffloadForecast, PhaseForecast, decode_forecast, forecast
from scheduler.model.offload.memory import MemoryParts, peaks
from scheduler.model.offload.problem import Problem
from scheduler.model.offload.work import Offload, SegmentWork, TableWork, Workload
from tpi.config import RECURRENT
from tpi.errors import PlanError
from tpi.partition import Range

_OFF = 1.1  # if a forecast is slower than the search expects by this factor, other layouts get a forecast, too
_COMPARED = 4  # number of other layouts that get a forecast


@dataclass(frozen=True)
class MemberForecast:
    """The forecast for one node: its layers, its bytes in RAM and on disk, and its times.

    Attributes:
        rank: the node's rank.
        layers: the layers of each of its stages.
        weight_bytes: bytes of its weights.
        disk_bytes: the part of `weight_bytes` that does not fit into memory.
        memory: its use of memory.
        decode: the node's times for a token.
        long: the input of the cost model from which the times of prompts are forecast.
        places: the locations of the weights, and the devices that compute.
    """

    rank: int
    layers: tuple[Range, ...]
    weight_bytes: int
    disk_bytes: int
    memory: MemoryParts
    decode: PhaseForecast
    long: Problem
    places: Offload

    @cached_property
    def prompt(self) -> OffloadForecast:
        """The forecast of the node's times for prompts."""
        return forecast(self.long, self.places)

    @property
    def request(self) -> Workload:
        """The requests that the plan is for."""
        return self.long.request


@dataclass(frozen=True)
class HomeForecast:
    """All nodes of a layout, and the seconds of a token and of a prompt."""

    layout: Layout
    members: tuple[MemberForecast, ...]

    @property
    def token(self) -> float:
        """Seconds of a token: each stage takes as long as its slowest node, for which the others wait at every sum."""
        if self.layout.ring:  # the forecast of a node knows no pauses between its stages
            return self.layout.seconds
        slowest = sum(max(each.decode.seconds for each in self.within(stage)) for stage in self.layout.stages)
        return max(self.layout.seconds, slowest + self.layout.hops + self.layout.turn)

    def streams(self, count: int) -> float:
        """Return the seconds per token, counting the tokens of all answers, if `count` answers are computed at once.

        It is the search's time for `count` answers, scaled by how much the forecast and the search differ for one.
        """
        return self.layout.streams(count) * self.token / self.layout.seconds

    @property
    def reads(self) -> bool:
        """True if any node reads weights from its disk for each token."""
        return any(each.disk_bytes for each in self.members)

    @property
    def disk(self) -> float:
        """Seconds of a token that are spent waiting for disks: those beyond computing, sums and hops."""
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

    The search for a layout does not count the memory that buffers for reads from disk take. If the forecast for the
    layout that it finds is slower than the search expects, forecasts are also made for its next best layouts and for
    the pure forms: one stage of all nodes, and stages of one node each. The fastest forecast is returned.

    Args:
        model: the model and the home.
        drop: whether nodes may be left out.
        several: whether there may be several stages.

    Raises:
        PlanError: if no layout fits the nodes' memories.
    """
    found, streams = layouts(model.staged, drop, several, model.streams), model.streams
    use = chosen(found, streams)
    if (best := _forecast(model, use)) is not None and best.token <= _OFF * use.seconds:
        return best
    pure = [each for each in pure_layouts(model.staged) if each is not None and (several or len(each.stages) == 1)]
    for layout in sorted((*found[:_COMPARED], *pure), key=lambda each: each.streams(streams)):
        if best is not None and layout.streams(streams) >= best.streams(streams):
            break  # no forecast is faster than its layout
        other = _forecast(model, layout)
        if other is not None and (best is None or other.streams(streams) < best.streams(streams)):
            best = other
    return best or forecast_home(model, use)


def asked_forecast(model: HomeModel, asked: str) -> HomeForecast:
    """Return the forecast for the stages that `--stages` asks for; arguments and errors as for `asked_layout`."""
    return forecast_home(model, asked_layout(model, asked))


def asked_layout(model: HomeModel, asked: str) -> Layout:
    """Return the layout for the stages that `--stages` asks for. The nodes of a stage get equal shares, as in a run.

    Args:
        model: the model and the home.
        asked: a number of stages, or the layers and nodes of each (`master.deployment.stages.lay_out`).

    Raises:
        PlanError: if the model cannot be cut into so many stages, or a node's memory cannot hold its part.
        UsageError: if `asked` cannot be read, or does not suit the nodes.
    """
    names, cuts = model.home.names, model.shape.config.stage_cuts
    laid = lay_out(asked, names, cuts, [1.0] * len(names))
    layout = evaluate(model.staged, [(each.first, each.last, each.ranks) for each in laid], equal=True)
    if layout is None:
        raise PlanError(
            f"--stages {asked}: a node has too little memory for its keys and values; give a smaller -c, or more memory"
        )
    return layout


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
    for rank in layout.members:
        stages = [stage for stage in layout.stages if rank in stage.split.members]
        held = [(stage.first, stage.last, *_units(stage, rank).items()) for stage in stages]
        alike = (model.home.machines[rank], rank == 0, *held)
        if alike not in known:
            known[alike] = _member(model, stages, rank)
        members.append(replace(known[alike], rank=rank))
    return HomeForecast(layout, tuple(members))


def _units(stage: Stage, rank: int) -> dict[str, int]:
    position = stage.split.members.index(rank)
    return {kind: counts[position] for kind, counts in stage.split.units.items()}


def _member(model: HomeModel, stages: Sequence[Stage], rank: int) -> MemberForecast:
    whole = model.whole
    segments = tuple(segment for stage in stages for segment in _segments(model, stage, _units(stage, rank)))
    table = whole.work.head if rank == 0 else TableWork()
    work = replace(whole.work, segments=segments, head=table)
    alone = Problem(work, model.home.machines[rank], whole.request, whole.needs, whole.limits)
    tokens = (1, round(alone.step("prompt")[0].tokens))
    sums = [model.exchange(stages[0].split.members, count)[0] for count in tokens]
    decode, prompt = (replace(alone, exchange=seconds) for seconds in (min(sums), max(sums)))
    places = choose(decode).offload
    lying = zip(segments, places.residence, strict=True)
    return MemberForecast(
        rank=rank,
        layers=tuple(Range(stage.first, stage.last) for stage in stages),
        weight_bytes=work.nbytes,
        disk_bytes=sum(segment.nbytes for segment, tier in lying if tier == "disk"),
        memory=peaks(work, places, alone.request, alone.needs, alone.chunk).host,
        decode=decode_forecast(decode, places),
        long=prompt,
        places=places,
    )


def _segments(model: HomeModel, stage: Stage, units: dict[str, int]) -> Iterator[SegmentWork]:
    """Yield the work of a node that holds the given number of units of each kind in every block of a stage."""
    shares = {each.kind: units[each.kind] / each.units for each in model.problem.kinds if each.kind in units}
    kinds = dict.fromkeys(RECURRENT, "heads") | {"attention": "heads", "ffn": "neurons", "experts": "experts"}
    held = layer_blocks(model.shape)[stage.first : stage.last]
    blocks = range(held[0].start, held[-1].stop)
    for each in model.whole.work.segments:
        if each.block in blocks:
            yield _cut(each, shares[kinds[model.shape.blocks[each.block].kind]])


def _cut(segment: SegmentWork, part: float) -> SegmentWork:
    return replace(
        segment,
        nbytes=round(segment.nbytes * part),
        weights=round(segment.weights * part),
        kv_token=round(segment.kv_token * part),
        pair=round(segment.pair * part),
    )
