"""The default layout over machines of different speeds: the fastest layout, which may leave some machines out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from master.deployment.deploy import master_memory, needs_one_stage, own_threads
from master.deployment.planner import Split
from master.deployment.stages import AUTO
from master.joining.measured import MeasuredWorkers
from master.options import RunOptions
from master.planning.home.asked import Neighbour, home_of_neighbours
from master.planning.home.compared import ComparedLayouts, layout_words
from master.planning.home.dealing import HomeModel
from master.planning.home.forecast import HomeForecast, best_forecast, forecast_home
from master.planning.node import NodeFlags, planned_node
from master.planning.problem import request_of
from master.planning.shapes import ModelShape, model_shape
from master.workers.cluster import Cluster
from master.workers.places import WorkerId
from master.workers.predictors import are_records
from master.workers.survey import WorkerLinks, measure_disks
from scheduler.model.home.layouts import evaluate
from scheduler.model.home.stages import Layout, StageProblem
from scheduler.model.machine import LAPTOP, DiskRate, NodeMachine, Rates
from tpi.devices.host import open_host
from tpi.errors import PlanError, TpiError
from tpi.keys.policy import KeyPolicy
from tpi.net.messages import StagePlan
from tpi.progress import note, phase, warn
from tpi.text import short_number, with_address
from worker.measure.disk import own_disk
from worker.measure.speed import machine_speed

_MS = 1e3
_CONTRADICTED = 1.5  # factor by which a measured step may differ from its forecast
_STEADY = 1.15  # factor by which two measurements of the same machines and links may differ


@dataclass(frozen=True)
class PlannedSplit:
    """A split by measured speeds and links, planned anew for the workers that are present.

    Implements `master.joining.shares.Sharing`.
    """

    shape: ModelShape
    own: NodeMachine
    measured: MeasuredWorkers
    options: RunOptions
    links: WorkerLinks
    used: dict[tuple[bytes | str, ...], Layout] = field(default_factory=dict)  # by keys of workers, or their addresses

    def among(self, workers: Sequence[WorkerId]) -> Sequence[float] | Split:
        """Return the best split over exactly `workers`; equal shares if any is not measured or nothing fits.

        If an earlier split of the same workers is about as fast, return it, because the workers have its weights.
        Print the layout and its forecast.
        """
        equal = [1.0] * (1 + len(workers))
        if new := self.measured.missing(workers):
            self.measured.ask(new)
        if not (known := self.measured.known(workers)):
            return equal
        try:
            layout = self._steady(workers, self.layout(known, drop=False))
        except PlanError:  # the same error is raised with the node's name when weights are assigned
            return equal
        form, names = "stages" if len(layout.stages) > 1 else "one stage", ("master", *(one.name for one in known))
        note(f"{form}: {layout_words(layout, names)}; {self._speed(layout)} expected")
        return split_of(layout)

    def _steady(self, workers: Sequence[WorkerId], best: Layout) -> Layout:
        """Return the earlier layout of `workers` if it is at most `_STEADY` times as slow as `best`, else `best`."""
        names = _names(workers)
        now = self._now(workers, best.problem)
        if now is not None and now.streams(self.options.streams) <= _STEADY * best.streams(self.options.streams):
            return self.used[names]
        self.used[names] = best
        return best

    def _now(self, workers: Sequence[WorkerId], problem: StageProblem) -> Layout | None:
        """Return the earlier layout of `workers`, with the times that `problem` gives it; None if there is none."""
        if (before := self.used.get(_names(workers))) is None:
            return None
        return evaluate(problem, [(stage.first, stage.last, stage.split.members) for stage in before.stages])

    def compared(self, workers: Sequence[WorkerId]) -> ComparedLayouts | None:
        """Return the layouts over `workers`; None if any is not measured, nothing fits, or there is one stage."""
        known = self.measured.known(workers)
        if not known or not self._several:
            return None
        model = self._model(known)
        try:
            layout = self._now(workers, model.staged) or self.layout(known, drop=False)
            return ComparedLayouts.of(model, layout, self._drafting(model, layout))
        except PlanError:
            return None

    def judge(self, workers: Sequence[WorkerId], seconds: float) -> None:
        """Compare the forecast for the layout over `workers` with the measured `seconds` of a step with one token.

        If they differ by more than `_CONTRADICTED`, have the links of its nodes measured again before the next plan,
        and say so. Layouts of one node, without messages, are not judged.
        """
        if not (known := self.measured.known(workers)):
            return
        layout = self._now(workers, self._model(known).staged)
        if layout is None or len(layout.members) < 2:
            return
        planned = layout.seconds
        if max(seconds / planned, planned / seconds) > _CONTRADICTED:
            ends = [one.end for rank, one in enumerate(known, 1) if rank in layout.members]
            if self.links.doubt(ends):
                took, expected = (short_number(_MS * each) for each in (seconds, planned))
                note(
                    f"a token took {took} ms, and the plan expected {expected} ms: the links between the nodes are "
                    "measured again before the next plan"
                )

    def _drafting(self, model: HomeModel, layout: Layout) -> float:
        """Return the seconds in which the model's layer for multi-token prediction drafts a token; 0 without one."""
        if not model.shape.mtp or self.options.draft is not None:
            return 0.0
        from master.planning.mtp import mtp_at_home  # late: it imports the code that loads the layer

        mtp = mtp_at_home(model, forecast_home(model, layout))
        return mtp.drafting if mtp else 0.0

    def meet(self, cluster: Cluster) -> None:
        """Measure the unknown links between the workers of `cluster`."""
        self.links.survey(cluster)

    def refused(self, workers: Sequence[WorkerId]) -> Mapping[WorkerId, str]:
        """Return the workers that the best layout leaves out; none if any was not measured, or if nothing fits."""
        known = self.measured.known(workers)
        try:
            best = self.layout(known)
        except PlanError:
            return {}
        out = (rank for rank in range(1, 1 + len(known)) if rank not in best.members)
        return {workers[rank - 1]: self._why(best, rank, known) for rank in out}

    def layout(self, neighbours: Sequence[Neighbour], drop: bool = True) -> Layout:
        """Return the best layout over this machine and `neighbours` or, with `drop`, over some of them.

        Raises:
            PlanError: if nothing fits.
        """
        return self.forecast(neighbours, drop).layout

    def forecast(self, neighbours: Sequence[Neighbour], drop: bool = True) -> HomeForecast:
        """Return the forecast for the layout that `layout` returns; raises the same error."""
        model = self._model(neighbours)
        several = self._several and not (model.home.cards and self.options.batched)
        return best_forecast(model, drop, several)

    def _model(self, neighbours: Sequence[Neighbour]) -> HomeModel:
        home = home_of_neighbours(self.own, neighbours, self.links)
        request = request_of(self.shape.config, None, None, 1, self.options.context)
        return HomeModel(self.shape, home, request, self.options.kv_dtype, self.options.streams)

    @property
    def _several(self) -> bool:
        """True if the layout may have several stages."""
        sparse = self.options.sparsity != "off" and are_records(self.shape.config, self.shape.blocks)
        return self.options.stages == AUTO and not needs_one_stage(self.options, sparse)

    def _why(self, best: Layout, rank: int, known: Sequence[Neighbour]) -> str:
        """Return a phrase with the reason why node `rank` is left out of `best`.

        The phrase has the expected speed without the node, the speed with it, and the latency and throughput of its
        link.
        """
        one = known[rank - 1]
        both = [other for at, other in enumerate(known, 1) if at in best.members or at == rank]
        slower = self._rate(both)
        slower = f", {slower} with it" if slower else ""
        return (
            f"{self._speed(best)} expected without it{slower} ({one.link.words()} away); --split equal uses every node"
        )

    def note(self, best: Layout, known: Sequence[Neighbour]) -> str:
        """Return a sentence that names the nodes left out of `best`, with the speeds; empty if there are none."""
        out = [one.name for rank, one in enumerate(known, 1) if rank not in best.members]
        if not out:
            return ""
        slower = self._rate(known)
        slower = f", {slower} with all nodes" if slower else ""
        without = f"{self._speed(best)} expected without {'it' if len(out) == 1 else 'them'}"
        return f"{', '.join(out)} left out: {without}{slower}; --split equal uses every node"

    def _rate(self, known: Sequence[Neighbour]) -> str:
        """Return a phrase with the tokens per second of a layout over all nodes of `known`; empty if nothing fits."""
        try:
            return short_number(1 / self.layout(known, drop=False).streams(self.options.streams))
        except PlanError:
            return ""

    def _speed(self, layout: Layout) -> str:
        """Return a phrase with the tokens per second of a layout, for as many answers at once as the options say."""
        count = self.options.streams
        together = f" with {count} answers at once" if count > 1 else ""
        return f"{short_number(1 / layout.streams(count))} tok/s{together}"


def _names(workers: Sequence[WorkerId]) -> tuple[bytes | str, ...]:
    return tuple(one.key or one.address for one in workers)


@dataclass(frozen=True)
class FirstSplit:
    """The split with which a run begins.

    Attributes:
        addresses: the addresses of the workers that take part.
        names: the names of the same workers.
        left_out: workers that were measured and do not take part.
        note: a sentence for the user that names the nodes left out, with reasons; empty if there are none.
    """

    sharing: PlannedSplit
    addresses: tuple[str, ...]
    names: tuple[str, ...]
    left_out: tuple[WorkerId, ...]
    note: str

    def words(self, found: str) -> str:
        """Return one sentence that names the workers used and the nodes left out, with reasons.

        `found` is the sentence about the found workers, which is returned unchanged if there is nothing to add.
        """
        if not self.note or not found:
            return self.note or found
        used = ", ".join(map(with_address, self.names, self.addresses))
        return f"using {used or 'this machine alone'}; {self.note}"


def plan_split(options: RunOptions, measured: MeasuredWorkers) -> FirstSplit | None:
    """Measure the workers and plan the split; return None if a worker does not answer or report its speed.

    The run then reports the problem when it connects to such a worker, or begins with equal shares.
    """
    with phase("asking the workers how fast they are"):
        neighbours = measured.ask_first(options.workers)
    if not neighbours:
        return None
    known = sorted((options.cache / "packs").glob("*/*.safetensors"))
    flags = NodeFlags(memory=master_memory(options), threads=own_threads(options))
    own = planned_node(flags, options.cache, known).machine
    room = own.memory + sum(one.machine.memory for one in neighbours)
    shape = model_shape(options.model, options.dtype, options.cache, room)
    links = _links(options)
    links.survey_at({one.address: one.end for one in neighbours})
    sharing = PlannedSplit(shape, own, measured, options, links)
    try:
        ahead = sharing.forecast(neighbours, drop=not options.keep_workers)
        if ahead.reads and (measured_now := _with_disks(options, sharing, neighbours)):
            sharing, neighbours = measured_now
            ahead = sharing.forecast(neighbours, drop=not options.keep_workers)
    except PlanError:  # the same error is raised with the node's name when weights are assigned
        return None
    best = ahead.layout
    used = [neighbours[rank - 1] for rank in best.members if rank]
    left_out = tuple(one.id for one in neighbours if one not in used)
    addresses, names = tuple(one.address for one in used), tuple(one.name for one in used)
    return FirstSplit(sharing, addresses, names, left_out, sharing.note(best, neighbours))


def _with_disks(
    options: RunOptions, sharing: PlannedSplit, neighbours: Sequence[Neighbour]
) -> tuple[PlannedSplit, list[Neighbour]] | None:
    """Measure the disks that are not measured yet; return `sharing` and `neighbours` with the new speeds.

    Return None if all speeds were known already, or if a worker does not answer any more.
    """
    unknown = [one.address for one in neighbours if not one.disk_known]
    rate, before = own_disk(options.cache), sharing.own.disk
    own = replace(sharing.own, disk=DiskRate(rate) if rate else before)
    if unknown:
        try:
            measure_disks(unknown, KeyPolicy(locked=options.keys))
        except TpiError as error:
            warn(f"the disks of workers were not measured: {error}")
        neighbours = sharing.measured.ask(options.workers)
    same = not unknown and own.disk == before
    return None if same or not neighbours else (replace(sharing, own=own), list(neighbours))


def split_later(options: RunOptions, measured: MeasuredWorkers) -> PlannedSplit:
    """Return a split for this machine alone, which is planned again when workers join.

    Takes a tenth of a second if this machine was not measured yet. Its disk is not measured, because requests may
    be waiting; the speed from an earlier run is used, or a laptop's.
    """
    memory = master_memory(options)
    speed = machine_speed(open_host().kernels, own_threads(options), options.cache)
    disk = DiskRate(speed.disk) if speed.disk else LAPTOP.disk
    own = NodeMachine(Rates(speed.read, speed.operations), memory, disk)
    shape = model_shape(options.model, options.dtype, options.cache, memory)
    return PlannedSplit(shape, own, measured, options, _links(options))


def _links(options: RunOptions) -> WorkerLinks:
    return WorkerLinks(options.links_cache, KeyPolicy(locked=options.keys))


def split_of(layout: Layout) -> Split:
    """Return the stages of a layout, and the shares of every kind in whole units.

    If no stage has units of a kind, that kind gets equal shares, which have no effect.
    """
    nodes = len(layout.problem.nodes)
    shares = {kind: [0.0] * nodes for kind in ("heads", "neurons", "experts", "shared")}
    for stage in layout.stages:
        members, units = stage.split.members, stage.split.units
        for kind, given in shares.items():
            for rank, count in zip(members, units.get(kind, (1,) * len(members)), strict=True):
                given[rank] = float(count)
    plans = tuple(StagePlan(stage.first, stage.last, stage.split.members) for stage in layout.stages)
    heads, neurons, experts, shared = map(tuple, shares.values())
    return Split(heads, neurons, experts, shared, plans)
