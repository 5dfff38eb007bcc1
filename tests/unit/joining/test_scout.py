"""New workers are measured before use, on a separate thread; a worker in reserve is called once it is faster."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Event
from typing import Any

import pytest

from master.joining.measured import MeasuredWorkers
from master.joining.probe import WorkerProbe
from master.planning.home.asked import Neighbour
from master.workers.places import WorkerId
from scheduler.model.machine import LAPTOP
from tests.support.house import until
from tpi.topology.links import Link

KEY, OTHER = b"\1" * 32, b"\2" * 32
HERE, THERE = WorkerId("192.0.2.1:1", KEY), WorkerId("192.0.2.2:1", KEY)
FAR = Neighbour(HERE.address, "far", LAPTOP, Link(0.1, 1e6), LAPTOP, KEY)


@dataclass
class Network:
    """Workers by their addresses, with their present measurements; others do not answer."""

    there: dict[str, Neighbour] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    sought: list[WorkerId] = field(default_factory=list)

    def __call__(self, addresses: Sequence[str], wanted: Callable[[], bool]) -> list[Neighbour]:
        self.asked += addresses
        return [self.there[one] for one in addresses] if self.there.keys() >= set(addresses) else []


@dataclass
class Worker:
    address: str
    admitted: bool | None = False


@contextmanager
def scouting(network: Network) -> Iterator[tuple[WorkerProbe, MeasuredWorkers]]:
    measured = MeasuredWorkers(network)
    scout = WorkerProbe(measured, network.sought.append)
    try:
        yield scout, measured
    finally:
        scout.close()
    assert scout._thread is None or not scout._thread.is_alive()


def test_a_new_worker_is_admitted_measured_or_not() -> None:
    network = Network({HERE.address: FAR})
    with scouting(network) as (scout, measured):
        for one in (HERE, THERE):
            worker: Any = Worker(one.address)
            scout.look_over(worker)
            until(lambda worker=worker: worker.admitted)  # type: ignore[misc]
        assert network.asked == [HERE.address, THERE.address]
        assert measured.known([HERE]) == [FAR]
        assert measured.known([HERE, WorkerId(THERE.address, OTHER)]) == []
        assert measured.missing([HERE, WorkerId(THERE.address, OTHER)]) == [THERE.address]


def test_a_worker_is_admitted_if_its_measurement_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(addresses: Sequence[str], wanted: Callable[[], bool]) -> list[Neighbour]:
        raise ValueError("no such thing")

    scout = WorkerProbe(MeasuredWorkers(fails), lambda one: None)
    try:
        for one in (HERE, THERE):
            worker: Any = Worker(one.address)
            scout.look_over(worker)
            until(lambda worker=worker: worker.admitted)  # type: ignore[misc]
    finally:
        scout.close()
    said = capsys.readouterr().err
    assert said == "tpi: measuring workers failed (ValueError: no such thing); it is tried again\n"


def test_a_local_worker_is_admitted_at_once() -> None:
    network = Network()
    with scouting(network) as (scout, _):
        worker: Any = Worker("127.0.0.1:9990")
        scout.look_over(worker)
        assert worker.admitted
    assert network.asked == []


@pytest.mark.parametrize(
    ("now", "called"),
    [
        (FAR, False),
        (replace(FAR, link=Link(0.08, 1.2e6)), False),  # noise
        (replace(FAR, link=Link(0.3, 1e5)), False),  # worse
        (replace(FAR, link=Link(0.001, 1e6)), True),
        (replace(FAR, link=Link(0.1, 1e8)), True),
        (replace(FAR, machine=replace(LAPTOP, memory=2 * LAPTOP.memory)), True),
        (replace(FAR, machine=replace(LAPTOP, host=replace(LAPTOP.host, read=2 * LAPTOP.host.read))), True),
        (replace(FAR, link=Link(0.001, 1e6), key=OTHER), False),  # another machine is there now
        (None, False),
    ],
)
def test_a_worker_in_reserve_is_called_once_it_is_better(now: Neighbour | None, called: bool) -> None:
    network = Network({HERE.address: FAR})
    measured = MeasuredWorkers(network)
    scout = WorkerProbe(measured, network.sought.append)
    measured.ask([HERE.address])
    scout._kept[HERE] = None  # without the thread, which looks once a minute
    network.there = {HERE.address: now} if now else {}
    scout.look()
    assert network.sought == ([HERE] if called else [])
    assert scout.kept == ([] if called else [HERE])
    scout.look()
    assert network.sought == ([HERE] if called else [])
    assert measured.known([HERE]) == [FAR]  # what it is compared with: it gets better little by little, too


def test_a_little_better_each_time_is_better_in_the_end() -> None:
    network = Network({HERE.address: FAR})
    measured = MeasuredWorkers(network)
    scout = WorkerProbe(measured, network.sought.append)
    measured.ask([HERE.address])
    scout._kept[HERE] = None
    for latency_s in (0.08, 0.07, 0.06):
        assert network.sought == []
        network.there[HERE.address] = replace(FAR, link=Link(latency_s, 1e6))
        scout.look()
    assert network.sought == [HERE]


def test_a_worker_is_in_reserve_only_where_it_was_measured() -> None:
    network = Network()
    with scouting(network) as (scout, _):
        scout.keep([HERE, WorkerId("192.0.2.3:1", OTHER)])
        assert scout.keeps(HERE.address, KEY)
        assert not scout.keeps(HERE.address, OTHER)
        assert not scout.keeps(THERE.address, KEY)  # over a cable it may be nearer
        scout.forget([KEY])  # it takes part, from wherever
        assert scout.kept == [WorkerId("192.0.2.3:1", OTHER)]
        scout.call(HERE)
        assert network.sought == []


def test_named_workers_are_never_measured() -> None:
    sought: list[WorkerId] = []
    scout = WorkerProbe(None, sought.append)
    scout.keep([HERE])
    worker: Any = Worker(THERE.address)
    scout.look_over(worker)
    assert worker.admitted
    assert scout._thread is None
    scout.call(HERE)
    assert sought == [HERE]
    scout.close()


def test_the_end_of_a_run_does_not_wait_for_a_silent_worker() -> None:
    asked = Event()

    def silent(addresses: Sequence[str], wanted: Callable[[], bool]) -> list[Neighbour]:
        asked.set()
        until(lambda: not wanted())
        return []

    scout = WorkerProbe(MeasuredWorkers(silent), lambda one: None)
    worker: Any = Worker(HERE.address)
    scout.look_over(worker)
    assert asked.wait(60)
    scout.close()
    assert scout._thread
    assert not scout._thread.is_alive()


def test_a_laptop_is_one_at_another_address() -> None:
    network = Network({HERE.address: FAR, THERE.address: replace(FAR, address=THERE.address, link=Link(0.001, 1e8))})
    measured = MeasuredWorkers(network)
    measured.ask([HERE.address])
    measured.ask([THERE.address])
    assert [one.address for one in measured.known([HERE])] == [THERE.address]  # where it was measured last
    assert measured.known([WorkerId("192.0.2.9:1", KEY)]) == measured.known([THERE])
