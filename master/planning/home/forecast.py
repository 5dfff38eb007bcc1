"""The forecast of a split, node by node: each computes its share on its own machine, and waits for the sums."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from master.planning.home.dealing import HomeModel
from scheduler.model.home.problem import HomeSplit
from scheduler.model.offload.choice import choose
from scheduler.model.offload.forecast import OffloadForecast, forecast
from scheduler.model.offload.memory import MemoryParts, peaks
from scheduler.model.offload.problem import Problem
from scheduler.model.offload.work import NodeWork, SegmentWork, TableWork
from tpi.config import RECURRENT


@dataclass(frozen=True)
class MemberForecast:
    """The forecast for one node: its units of a block by kind, its bytes in RAM and on disk, and its times."""

    rank: int
    units: dict[str, int]
    weight_bytes: int
    disk_bytes: int  # part of `weight_bytes` that is read for every token
    memory: MemoryParts
    decode: OffloadForecast
    prompt: OffloadForecast


@dataclass(frozen=True)
class HomeForecast:
    """All nodes of a split, and the seconds of a token and of a prompt, which are those of the slowest node."""

    dealing: HomeSplit
    members: tuple[MemberForecast, ...]

    @property
    def token(self) -> float:
        """Seconds of a token: sums wait for the slowest node at every block, while disks read ahead."""
        return max(self.dealing.seconds, max(each.decode.decode.seconds for each in self.members))

    @property
    def disk(self) -> float:
        """Seconds of a token spent waiting for disks, in addition to computing and sums."""
        return self.token - self.dealing.compute - self.dealing.exchange

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return max(each.prompt.ttft for each in self.members)

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens per second."""
        return min(each.prompt.prompt.rate for each in self.members)


def forecast_home(model: HomeModel, dealing: HomeSplit) -> HomeForecast:
    """Return the forecast for `dealing`.

    Raises:
        PlanError: if a node's memory cannot hold its part in any way.
    """
    known: dict[tuple[object, ...], MemberForecast] = {}
    members = []
    for position, rank in enumerate(dealing.members):
        units = {kind: counts[position] for kind, counts in dealing.units.items()}
        alike = (model.home.machines[rank], rank == 0, *units.items())
        if alike not in known:
            known[alike] = _member(model, dealing, rank, units)
        members.append(replace(known[alike], rank=rank))
    return HomeForecast(dealing, tuple(members))


def _member(model: HomeModel, dealing: HomeSplit, rank: int, units: dict[str, int]) -> MemberForecast:
    whole = model.whole
    work = _share(model, units, rank == 0)
    machine = model.home.machines[rank]
    alone = Problem(work, machine, whole.request, whole.needs, whole.limits)
    sums = {tokens: model.exchange(dealing.members, tokens)[0] for tokens in (1, round(alone.step("prompt")[0].tokens))}
    decode, prompt = (replace(alone, exchange=seconds) for seconds in (min(sums.values()), max(sums.values())))
    chosen = choose(decode).offload
    lying = zip(work.segments, chosen.residence, strict=True)
    return MemberForecast(
        rank=rank,
        units=units,
        weight_bytes=work.nbytes,
        disk_bytes=sum(segment.nbytes for segment, tier in lying if tier == "disk"),
        memory=peaks(work, chosen, alone.request, alone.needs, alone.chunk).host,
        decode=forecast(decode, chosen),
        prompt=forecast(prompt, chosen),
    )


def _share(model: HomeModel, units: dict[str, int], master: bool) -> NodeWork:
    """Return the work of a node that holds `units` of every block; the `master` also computes the head."""
    shares = {each.kind: units[each.kind] / each.units for each in model.problem.kinds}
    kinds = dict.fromkeys(RECURRENT, "heads") | {"attention": "heads", "ffn": "neurons", "experts": "experts"}
    parts = [shares[kinds[block.kind]] for block in model.shape.blocks]
    segments: Sequence[SegmentWork] = [_cut(each, parts[each.block]) for each in model.whole.work.segments]
    table = model.whole.work.head if master else TableWork()
    return replace(model.whole.work, segments=tuple(segments), head=table)


def _cut(segment: SegmentWork, part: float) -> SegmentWork:
    return replace(
        segment,
        nbytes=round(segment.nbytes * part),
        weights=round(segment.weights * part),
        kv_token=round(segment.kv_token * part),
        pair=round(segment.pair * part),
    )
