"""A planned split belongs to the measured machines, wherever they are; a joining machine is measured first."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from allreduce import cache
from master.deployment.planner import Split
from master.joining import split
from master.joining.measured import MeasuredWorkers
from master.joining.shares import SharesLater
from master.joining.split import PlannedSplit, plan_split
from master.options import RunOptions
from master.planning.home import asked
from master.planning.home.asked import Neighbour, neighbours_at
from master.planning.node import PlannedNode
from master.planning.shapes import model_shape
from master.workers.asking import WorkerInquiry
from master.workers.places import WorkerId
from master.workers.survey import WorkerLinks
from scheduler.model.home.problem import HomeNode, HomeSplit, UnitKind
from scheduler.model.home.stages import LayerWork, Layout, Stage, StageProblem
from scheduler.model.machine import LAPTOP, DiskRate
from tests.support.paths import DATA
from tpi.devices.options import DeviceOptions, OffloadOptions
from tpi.keys.policy import KeyPolicy
from tpi.net.fields import MachineSpeed, Profile
from tpi.net.questions import Condition
from tpi.text import short_number
from tpi.topology.links import Link, LinkTable

FAST, SLOW, NEW = b"\1" * 32, b"\2" * 32, b"\3" * 32
SPEED = MachineSpeed(1e10, 1e11, 1e9)
MEASURED = Profile("laptop", "Linux", 4, 4, 1 << 34, 1 << 33, 0, 1 << 25, 1 << 40, speed=SPEED)
CONDITION = Condition(7, "1", "laptop", "", 0.0, 0.0, 2, 3, replace(MEASURED, speed=None), ())
KEYS = {"fast": FAST, "slow0": SLOW, "new": NEW, "second": FAST}


def neighbour(address: str, key: bytes) -> Neighbour:
    return Neighbour(address, address, LAPTOP, Link(0.001, 1e8), LAPTOP, key)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> PlannedSplit:
    """Return the plan for two machines; each node gets as many heads as its address has letters."""

    def dealt(self: PlannedSplit, neighbours: Sequence[Neighbour], drop: bool) -> Layout:
        nodes = [HomeNode("node", 1.0, 1.0, 1)] * (1 + len(neighbours))
        layer = LayerWork((UnitKind("heads", 9, 1, 0.0, 1.0),), 0)
        problem = StageProblem(tuple(nodes), (layer,), (0, 1), lambda *_: 0.0, lambda *_: 0.0)
        heads = (1, *(len(one.address) for one in neighbours))
        split = HomeSplit(tuple(range(len(heads))), {"heads": heads}, 1.0, 0.0)
        return Layout(problem, (Stage(0, 1, split, 0.0),), 0.0, 0.0)

    def measure(addresses: Sequence[str], wanted: Callable[[], bool]) -> list[Neighbour]:
        return [neighbour(one, KEYS[one]) for one in addresses if one in KEYS]

    monkeypatch.setattr(PlannedSplit, "layout", dealt)
    nothing: Any = None
    measured = MeasuredWorkers(measure)
    measured.ask(["fast", "slow0"])
    return PlannedSplit(nothing, LAPTOP, measured, RunOptions("llama"), nothing)


def heads(planned: PlannedSplit, *workers: WorkerId) -> list[float]:
    found = planned.among(workers)
    return list(found.heads if isinstance(found, Split) else found)


def test_a_laptop_at_another_address_keeps_its_plan(planned: PlannedSplit) -> None:
    assert heads(planned, WorkerId("fast", FAST)) == [1, 4]
    assert heads(planned, WorkerId("somewhere", FAST), WorkerId("else", SLOW)) == [1, 4, 5]
    assert heads(planned, WorkerId("slow0", FAST), WorkerId("fast", SLOW)) == [1, 4, 5]


def test_two_workers_of_one_machine_are_both_planned_with(planned: PlannedSplit) -> None:
    """They share the machine's key."""
    planned.measured.ask(["fast", "second"])
    assert heads(planned, WorkerId("fast", FAST), WorkerId("second", FAST)) == [1, 4, 6]
    assert heads(planned, WorkerId("second", FAST), WorkerId("fast", FAST)) == [1, 6, 4]


def test_a_joining_worker_is_measured_once_and_planned_with(planned: PlannedSplit) -> None:
    assert heads(planned, WorkerId("fast", FAST), WorkerId("new", NEW)) == [1, 4, 3]
    assert heads(planned, WorkerId("moved", NEW)) == [1, 3]
    assert heads(planned, WorkerId("fast", FAST), WorkerId("mute", b"\4" * 32)) == [1, 1, 1]


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (WorkerInquiry("laptop:1", problem="no worker answers at laptop:1"), "no worker answers at laptop:1"),
        (
            WorkerInquiry("laptop:1", condition=CONDITION, name="laptop"),
            "laptop (laptop:1) does not say how fast it is; start",
        ),
        (
            WorkerInquiry("laptop:1", condition=replace(CONDITION, profile=MEASURED), name="laptop"),
            "laptop (laptop:1) answered too slowly to measure the link to it; try again",
        ),
    ],
    ids=["it is silent", "it says nothing of itself", "the link to it"],
)
def test_an_unmeasurable_worker_is_named_once_with_the_reason(
    found: WorkerInquiry, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message explains why all nodes, also slow ones, get equal shares."""
    fine = WorkerInquiry("fast:1", condition=replace(CONDITION, profile=MEASURED), name="fast", link=Link(0.001, 1e8))

    def answers(net: object, addresses: Sequence[str], **more: object) -> list[WorkerInquiry]:
        return [{"fast:1": fine, "laptop:1": found}[one] for one in addresses]

    monkeypatch.setattr(asked, "ask", answers)
    measured = MeasuredWorkers(partial(neighbours_at, policy=KeyPolicy()))
    options = RunOptions("llama", workers=("fast:1", "laptop:1"))
    assert plan_split(options, measured) is None
    assert "equal shares" not in capsys.readouterr().err  # a worker that cannot be connected ends the run
    measured.warn_of_failure()
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"tpi: {why}")
    assert said[0].endswith("; until it can be measured, all nodes get equal shares; use --split to set other shares")
    assert measured.ask(["laptop:1"]) == []
    assert not measured.improved(WorkerId("laptop:1", NEW))
    assert [one.name for one in measured.ask(["fast:1"])] == ["fast"]
    assert capsys.readouterr().err == ""


def home_of(**links: Link) -> PlannedSplit:
    """Return a home of a laptop and others of its kind at the ends of `links`, with a large model."""
    shape = model_shape(str(DATA / "llama-3.1-70b" / "config.json"), "q4", DATA, 1 << 36)
    machine = replace(LAPTOP, memory=1 << 36)

    def measure(addresses: Sequence[str], wanted: Callable[[], bool]) -> list[Neighbour]:
        return [Neighbour(one, one, machine, links[one], machine, one.encode()) for one in addresses]

    measured = MeasuredWorkers(measure)
    measured.ask(list(links))
    return PlannedSplit(shape, machine, measured, RunOptions("llama"), WorkerLinks(None))


def worker(name: str) -> WorkerId:
    return WorkerId(name, name.encode())


def test_a_slowing_worker_is_refused_with_figures() -> None:
    home = home_of(near=Link(0.0005, 1e8), far=Link(2.0, 1e6))
    assert home.refused([worker("near")]) == {}
    assert home.refused([]) == {}
    (out, why), *others = home.refused([worker("near"), worker("far")]).items()
    assert (out, others) == (worker("far"), [])
    said = r"[\d.]+ tok/s expected without it, 0\.[\d.]+ with it \(2000 ms and 8 Mbit/s away\); --split equal .*"
    assert re.fullmatch(said, why)
    known = home.measured.known([worker("near"), worker("far")])
    said = r"far left out: [\d.]+ tok/s expected without it, 0\.[\d.]+ with all nodes; --split equal uses every node"
    assert re.fullmatch(said, home.note(home.layout(known), known))
    assert home.refused([worker("near"), worker("never measured")]) == {}


def test_far_machines_that_are_all_needed_hold_layers() -> None:
    """A 70B model does not fit into one laptop, and a sum over these links takes longer than a hop."""
    home = home_of(**{name: Link(0.05, 1e8) for name in ("a", "b")})
    small = replace(home, own=replace(home.own, memory=1 << 34))
    found = small.among([worker("a"), worker("b")])
    assert isinstance(found, Split)
    assert {rank for stage in found.stages for rank in stage.ranks} >= {1, 2}
    assert len(found.stages) > 1
    assert [stage.first for stage in found.stages] == [0, *(stage.last for stage in found.stages[:-1])]


def test_workers_that_come_back_get_the_split_whose_weights_they_have() -> None:
    """Their speeds are measured again, and differ a little. A split that is much faster is used instead."""
    links, workers = {"a": Link(0.001, 1e8), "b": Link(0.001, 1e8)}, [worker("a"), worker("b")]
    first = home_of(**links)
    wanted = first.among(workers)
    for faster, same in ((1.05, True), (4.0, False)):
        host = replace(LAPTOP.host, read=faster * LAPTOP.host.read)
        again = replace(home_of(**links), own=replace(first.own, host=host))
        assert again.among(workers) != wanted
        assert (replace(again, used=dict(first.used)).among(workers) == wanted) is same
    assert first.among([worker("a")]) != wanted


@pytest.mark.parametrize(
    "asked",
    [
        {"stages": "1"},
        {"collective": "torch"},
        {"collective": "shared"},
        {"devices": DeviceOptions(offload=OffloadOptions(pipeline="batch"))},
    ],
)
def test_what_needs_one_stage_gets_one_with_the_master(asked: dict[str, Any]) -> None:
    home = home_of(a=Link(0.05, 1e8), b=Link(0.05, 1e8))
    found = replace(home, options=replace(home.options, **asked)).among([worker("a"), worker("b")])
    assert isinstance(found, Split)
    assert [stage.ranks for stage in found.stages] == [(0, 1, 2)]


def test_shares_are_planned_once_a_remote_worker_joins() -> None:
    home, made = home_of(**{"192.0.2.1:1": Link(0.0005, 1e8), "192.0.2.2:1": Link(2.0, 1e6)}), list[str]()

    def plan() -> PlannedSplit:
        made.append("a plan")
        return home

    later, near, far = SharesLater(plan), worker("192.0.2.1:1"), worker("192.0.2.2:1")
    local = WorkerId("127.0.0.1:1")
    assert later.among([]) == [1.0]
    assert later.among([local]) == [1.0, 1.0]
    assert later.refused([]) == later.refused([local]) == {}
    assert made == []
    assert isinstance(later.among([near]), Split)
    assert list(later.refused([near, far])) == [far]
    assert made == ["a plan"]


def test_stages_are_chosen_for_the_answers_at_once_that_were_asked_for() -> None:
    home, workers = home_of(a=Link(0.005, 1e8), b=Link(0.005, 1e8)), [worker("a"), worker("b")]
    many = replace(home, options=replace(home.options, streams=6))
    one, six = (len(each.layout(each.measured.known(workers)).stages) for each in (home, many))
    assert (one, six) == (1, 3)


@pytest.mark.parametrize("room", [1 << 34, 1 << 40])
def test_disks_are_measured_before_a_plan_that_reads_from_them(
    room: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where all weights fit into memory, no disk is measured."""
    asked_for: list[list[str]] = []
    fast = replace(LAPTOP, memory=room)
    known = {"10.0.0.1:1": fast, "10.0.0.2:1": replace(fast, memory=room // 4)}

    def measure(addresses: Sequence[str], wanted: Callable[[], bool]) -> list[Neighbour]:
        disk = DiskRate(1e8) if asked_for else LAPTOP.disk
        return [
            Neighbour(one, one, replace(known[one], disk=disk), Link(0.05, 1e8), fast, one.encode(), bool(asked_for))
            for one in addresses
        ]

    def measure_disks(addresses: Sequence[str], policy: KeyPolicy) -> None:
        asked_for.append(list(addresses))

    monkeypatch.setattr(split, "measure_disks", measure_disks)
    monkeypatch.setattr(split, "own_disk", lambda cache: 1e8)
    monkeypatch.setattr(split, "planned_node", lambda *flags: PlannedNode(replace(fast, memory=room // 4), ""))
    monkeypatch.setattr(WorkerLinks, "survey_at", lambda *workers: None)
    shape = str(DATA / "llama-3.1-70b/config.json")
    options = RunOptions(shape, workers=tuple(known), dtype="q4", cache=tmp_path, keep_workers=True, context=2048)
    found = plan_split(options, MeasuredWorkers(measure))
    assert found is not None
    assert asked_for == ([list(known)] if room == 1 << 34 else [])
    assert found.sharing.own.disk == (DiskRate(1e8) if asked_for else LAPTOP.disk)


@pytest.mark.parametrize(("times", "doubted"), [(1.0, False), (1.4, False), (1.6, True), (0.6, True), (0.7, False)])
def test_links_are_measured_again_if_a_token_does_not_take_as_long_as_planned(
    times: float, doubted: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, names = tmp_path / "links.json", ("near", "other")
    planned = replace(home_of(**dict.fromkeys(names, Link(0.001, 1e8))), links=WorkerLinks(file))
    workers = [WorkerId(name, name.encode()) for name in names]
    planned.measured._known[:] = [replace(one, end=one.name) for one in planned.measured._known]
    cache.save(file, ["master", *names], LinkTable.uniform(3, Link(0.001, 1e8)).links, {})
    planned.judge(workers, 1.0)  # nothing was planned yet
    assert isinstance(planned.among(workers), Split)
    capsys.readouterr()
    layout = planned.used[tuple(name.encode() for name in names)]
    assert len(layout.members) == 3
    planned.judge(workers, times * layout.seconds)
    left = 0 if doubted else 3
    assert len(cache.load(file, ["master", *names])) == left
    assert len(planned.links.between(names)) == left // 3
    assert ("measured again" in capsys.readouterr().err) == doubted


@pytest.mark.parametrize(("latency", "form"), [(1e-6, "one stage: master+near; "), (0.02, "stages: 0-")])
def test_the_chosen_layout_and_its_forecast_are_printed(
    latency: float, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    room = 24 << 30  # bytes; no machine holds the model alone
    home = home_of(near=Link(latency, 1e9))
    planned = replace(home, own=replace(home.own, memory=room))
    planned.measured._known[:] = [
        replace(one, machine=replace(one.machine, memory=room)) for one in planned.measured._known
    ]
    planned.among([WorkerId("near", b"near")])
    (layout,) = planned.used.values()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tpi: {form}")
    assert line.endswith(f"; {short_number(1 / layout.seconds)} tok/s expected")
