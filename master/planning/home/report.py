"""The report of `tpi plan` on a home, as figures: made once, for the table and for `--json`."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from master.deployment.stages import AUTO, ONE
from master.planning.home.compared import ComparedLayouts, seconds_by_part
from master.planning.home.dealing import HomeModel
from master.planning.home.forecast import HomeForecast, MemberForecast, asked_forecast, asked_layout, best_forecast
from master.planning.shapes import weight_bytes
from scheduler.model.home.layouts import best_layout, layouts
from scheduler.model.home.stages import Layout
from scheduler.model.offload.forecast import Gain
from tpi.partition import Range
from tpi.topology.links import Link, LinkTable

if TYPE_CHECKING:
    from master.planning.mtp import MtpForecast

_TIMES = 2.0  # factor by which a resource is improved to find its gain
_PERCENT = 100


@dataclass(frozen=True)
class HomeReport:
    """A plan of a model on a home.

    Attributes:
        model: the model and the home.
        compared: the layouts that were compared, and the one to use.
        ahead: the forecast of the layout to use.
        asked: True if `--stages` gave the stages.
        with_all: the best layout over all nodes, if the planner has left some out; else None.
        gains: the speed-up of a token from more of each resource.
        mtp: the layer for multi-token prediction on the master; None if there is none, or if a run would not draft.
    """

    model: HomeModel
    compared: ComparedLayouts
    ahead: HomeForecast
    asked: bool
    with_all: Layout | None
    gains: tuple[Gain, ...]
    mtp: "MtpForecast | None" = None

    @classmethod
    def of(cls, model: HomeModel, drop: bool = True, stages: str = AUTO) -> "HomeReport":
        """Return the report on a layout of the model and on the forecast of its speed.

        Args:
            model: the model and the home.
            drop: whether nodes that make a token slower are left out of the best layout.
            stages: the value of `--stages`. The best layout is taken if it is `auto`, or of one stage if it is `1`.

        Raises:
            PlanError: if the nodes' memories cannot hold the model.
            UsageError: if `stages` cannot be read, or does not suit the model or the nodes.
        """
        asked = stages not in (AUTO, ONE)
        ahead = asked_forecast(model, stages) if asked else best_forecast(model, drop, stages == AUTO)
        mtp = None
        if model.shape.mtp:
            from master.planning.mtp import mtp_at_home  # late: it imports the code that loads the layer

            mtp = mtp_at_home(model, ahead)
        compared = ComparedLayouts.of(model, ahead.layout, mtp.drafting if mtp else 0.0)
        dropped = len(ahead.members) < len(model.home.names) and not asked
        with_all = layouts(model.staged, False, stages == AUTO, model.streams) if dropped else []
        gains = _gains(model, ahead.layout, stages)
        return cls(model, compared, ahead, asked, next(iter(with_all), None), tuple(gains), mtp)

    @property
    def layout(self) -> Layout:
        """The layout that a run would use."""
        return self.ahead.layout

    @property
    def faster(self) -> Layout | None:
        """A faster layout that leaves out nodes which were to be used; None if there is none."""
        if self.with_all is not None or self.asked:
            return None
        best = best_forecast(self.model)
        left = not {*self.layout.members} <= {*best.layout.members}
        return best.layout if left and best.token < self.ahead.token else None

    @property
    def collective(self) -> str:
        """The algorithm that sums single tokens fastest in the largest stage."""
        return self.model.exchange(max((stage.split.members for stage in self.layout.stages), key=len), 1)[1]

    @property
    def left_out(self) -> list[str]:
        """The names of the nodes that hold no layers."""
        return [name for rank, name in enumerate(self.model.home.names) if rank not in self.layout.members]

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of a token, by the resource that they are spent on."""
        return seconds_by_part(self.layout) | {"disks": self.ahead.disk}

    @property
    def slowest(self) -> MemberForecast:
        """The node that takes the longest for its part."""
        return max(self.ahead.members, key=lambda each: each.decode.seconds)

    def name(self, member: MemberForecast) -> str:
        """Return the name of the node that `member` describes."""
        return self.model.home.names[member.rank]

    def holds(self, member: MemberForecast) -> dict[str, int]:
        """Return a node's numbers of heads and neurons in a layer; for experts, the neurons of each expert."""
        split = next(stage.split for stage in self.layout.stages if member.rank in stage.split.members)
        at, found = split.members.index(member.rank), {}
        for kind, counts in split.units.items():
            width, limit = self.model.items(kind)
            found[kind] = len(Range(sum(counts[:at]), sum(counts[: at + 1])).scaled(width, limit))
        return found

    def fields(self) -> dict[str, Any]:
        """Return the object for `--json`: times in seconds, sizes in bytes."""
        shape, ahead = self.model.shape, self.ahead
        return {
            "model": {
                "name": shape.name, "dtype": shape.dtype, "layers": shape.config.layers,
                "weight_bytes": weight_bytes(shape),
            },
            "request": asdict(self.model.request),
            "ttft_s": ahead.ttft,
            "prefill_tokens_per_s": ahead.prompt_rate,
            "decode_tokens_per_s": 1 / ahead.token,
            "decode_tokens_per_s_at_once": 1 / ahead.streams(self.model.streams),
            "token_s": self.parts,
            "mtp": self.mtp.fields() if self.mtp else None,
            "layouts": self.compared.fields(),
            "bottleneck": {"of": max(self.parts, key=self.parts.__getitem__), "node": self.name(self.slowest)},
            "collective": self.collective,
            "left_out": self.left_out,
            "with_everyone_tokens_per_s": 1 / self.with_all.seconds if self.with_all else None,
            "gains": [asdict(gain) for gain in self.gains],
            "nodes": [self._node(member) for member in ahead.members],
        }  # fmt: skip

    def _node(self, member: MemberForecast) -> dict[str, Any]:
        machine = self.model.home.machines[member.rank]
        return {
            "name": self.name(member),
            "layers": [each.as_list() for each in member.layers],
            "holds": self.holds(member),
            "weight_bytes": member.weight_bytes,
            "disk_bytes": member.disk_bytes,
            "memory": asdict(member.memory) | {"total": member.memory.total, "limit": machine.memory},
            "use_percent": {lane: round(_PERCENT * part, 1) for lane, part in member.decode.use.items()},
        }


def _gains(model: HomeModel, layout: Layout, stages: str) -> Iterator[Gain]:
    """Yield, for each resource, how many times as fast a token is with twice as much of it; the largest gain first.

    For each resource a new layout is chosen, unless `stages`, the value of `--stages`, determines the layout.
    """
    home = model.home
    better: dict[str, HomeModel] = {
        "quicker links": replace(model, home=replace(home, links=_faster(home.links, 1, _TIMES))),
        "wider links": replace(model, home=replace(home, links=_faster(home.links, _TIMES, 1))),
    }
    for what, change in (("RAM", "memory"), ("RAM speed", "host"), ("disk speed", "disk")):
        better[f"{what} everywhere"] = replace(model, home=replace(home, machines=tuple(_more(home, change))))

    def seconds(changed: HomeModel) -> float:
        if stages in (AUTO, ONE):
            return best_layout(changed.staged, True, stages == AUTO, model.streams).streams(model.streams)
        return asked_layout(changed, stages).streams(model.streams)

    found = (Gain(thing, _TIMES, layout.streams(model.streams) / seconds(each)) for thing, each in better.items())
    yield from sorted(found, key=lambda gain: -gain.faster)


def _faster(links: LinkTable, rate: float, quickness: float) -> LinkTable:
    changed = {at: Link(link.latency_s / quickness, link.bytes_per_s * rate) for at, link in links.links.items()}
    return LinkTable(links.size, changed)


def _more(home: Any, what: str) -> Iterator[Any]:
    for machine in home.machines:
        if what == "memory":
            yield replace(machine, memory=round(machine.memory * _TIMES))
        elif what == "host":
            yield replace(machine, host=replace(machine.host, read=machine.host.read * _TIMES))
        else:
            yield replace(machine, disk=replace(machine.disk, read=machine.disk.read * _TIMES))
