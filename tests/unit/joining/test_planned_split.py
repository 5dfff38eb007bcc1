"""A planned split goes with the machines that were measured, wherever they are; who joins is measured then."""

from collections.abc import Sequence
from typing import Any

import pytest

from master.deployment.planner import Split
from master.joining import split
from master.joining.split import PlannedSplit
from master.planning.home.asked import Neighbour
from master.workers.places import WorkerId
from scheduler.model.home.problem import Dealing
from scheduler.model.machine import LAPTOP
from tpi.topology.links import Link

FAST, SLOW, NEW = b"\1" * 32, b"\2" * 32, b"\3" * 32


def neighbour(address: str, key: bytes) -> Neighbour:
    return Neighbour(address, address, LAPTOP, Link(0.001, 1e8), LAPTOP, key)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> PlannedSplit:
    """Of two machines, the slow one left out; a deal gives each node as many heads as its address is long."""

    def problem(self: PlannedSplit, neighbours: Sequence[Neighbour]) -> Any:
        return neighbours

    def dealt(neighbours: Any, members: tuple[int, ...]) -> Dealing:
        return Dealing(members, {"heads": (1, *(len(one.address) for one in neighbours))}, 1.0, 0.0)

    def measure(addresses: Sequence[str]) -> list[Neighbour]:
        return [neighbour(one, NEW) for one in addresses if one == "new"]

    monkeypatch.setattr(PlannedSplit, "problem", problem)
    monkeypatch.setattr(split, "split_over", dealt)
    nothing: Any = None
    measured = [neighbour("fast", FAST), neighbour("slow0", SLOW)]
    return PlannedSplit(nothing, LAPTOP, measured, ("fast",), nothing, measure)


def heads(planned: PlannedSplit, *workers: WorkerId) -> list[float]:
    found = planned.among(workers)
    return list(found.heads if isinstance(found, Split) else found)


def test_a_laptop_at_another_address_keeps_its_plan(planned: PlannedSplit) -> None:
    assert heads(planned, WorkerId("fast", FAST)) == [1, 4]
    assert heads(planned, WorkerId("somewhere", FAST), WorkerId("else", SLOW)) == [1, 4, 5]
    assert heads(planned, WorkerId("slow0", FAST), WorkerId("fast", SLOW)) == [1, 4, 5]
    assert planned.left_out == (WorkerId("slow0", SLOW),)


def test_who_joins_is_measured_once_and_planned_with(planned: PlannedSplit) -> None:
    assert heads(planned, WorkerId("fast", FAST), WorkerId("new", NEW)) == [1, 4, 3]
    assert heads(planned, WorkerId("moved", NEW)) == [1, 3]
    assert heads(planned, WorkerId("fast", FAST), WorkerId("mute", b"\4" * 32)) == [1, 1, 1]
