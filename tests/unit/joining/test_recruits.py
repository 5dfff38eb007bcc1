"""Who is called in the background, how often, and when it counts."""

from types import SimpleNamespace
from typing import Any

from master.joining.lookout import Lookout
from master.joining.recovery import Membership
from master.joining.shares import Shares
from master.workers.recruits import RETRY_S, ROOM_S, Recruits
from master.workers.remote import RemoteWorker
from tpi.errors import NodeInUse, PlanError, TpiError


class Called:
    """A worker that answers at once, with so much memory, or has a problem."""

    def __init__(self, address: str, memory: int, problem: TpiError | None = None) -> None:
        self.address = self.name = address
        self.key, self.connected, self.idle, self.closed = b"", True, True, False
        self.problem = problem
        self.hello = SimpleNamespace(profile=SimpleNamespace(memory_limit=memory, memory_free=0))

    def serve(self) -> None:
        pass

    def close(self, linger_ms: int) -> None:
        self.closed = True


class House:
    """Workers by their addresses: what `memory` says they have now, or what is wrong with them."""

    def __init__(self) -> None:
        self.memory: dict[str, int] = {}
        self.problem: dict[str, TpiError] = {}
        self.calls: list[Called] = []

    def call(self, address: str) -> Any:
        self.calls.append(Called(address, self.memory.get(address, 1 << 30), self.problem.get(address)))
        return self.calls[-1]


def test_who_is_busy_is_called_until_it_is_free() -> None:
    house = House()
    recruits = Recruits(house.call)
    house.problem["a"] = NodeInUse("a", "worker a is in use")
    recruits.seek("a")
    for now in (0.0, RETRY_S / 2, RETRY_S):
        recruits.tend(now)
    assert len(house.calls) == 2
    assert not recruits.ready
    house.problem.clear()
    recruits.tend(2 * RETRY_S)
    assert [id(one) for one in recruits.take()] == [id(house.calls[2])]
    recruits.tend(9 * RETRY_S)
    assert len(house.calls) == 3


def test_who_has_too_little_memory_is_let_go_until_it_has_more() -> None:
    house = House()
    recruits = Recruits(house.call)
    house.memory["a"] = 100
    recruits.seek("a", above=100)
    recruits.tend(0.0)
    assert house.calls[0].closed  # others can use it
    assert not recruits.called
    recruits.tend(ROOM_S / 2)
    house.memory["a"] = 101
    recruits.tend(ROOM_S)
    assert [id(one) for one in recruits.ready] == [id(house.calls[1])]


class Joined:
    """A cluster whom some have joined; the plan is too much for whom `PlanError` names."""

    def __init__(self, *workers: RemoteWorker) -> None:
        self.workers, self.recruits, self.weights_sent = list(workers), self, 0
        self.ready = list(workers)
        self.postponed: list[tuple[list[str], list[str]]] = []

    def join(self) -> list[RemoteWorker]:
        return self.ready

    def postpone(self, workers: list[RemoteWorker], full: list[RemoteWorker]) -> None:
        self.postponed.append(([one.name for one in workers], [one.name for one in full]))
        self.workers = [one for one in self.workers if one not in workers]


def membership(cluster: Any, *errors: TpiError) -> Membership:
    left = list(errors)

    def deploy(shares: object) -> None:
        if left:
            raise left.pop(0)

    lookout = Lookout(list, lambda address: None)
    return Membership(cluster, Shares(1.0, {}), deploy, lambda text: None, 0.0, False, lookout)


def workers(house: House) -> list[Any]:
    return [house.call("a"), house.call("b")]


def test_only_who_has_no_room_waits_for_more() -> None:
    for named, full in (("a", ["a"]), ("master", ["a", "b"])):
        cluster = Joined(*workers(House()))
        membership(cluster, PlanError("too little", named)).welcome(fresh=True)
        assert cluster.postponed == [(["a", "b"], full)]


def test_who_is_left_out_at_the_beginning_is_called_again() -> None:
    cluster = Joined(*workers(House()))
    membership(cluster, PlanError("too little", "b")).begin(optional=True)
    assert cluster.postponed == [(["b"], ["b"])]
    assert [one.name for one in cluster.workers] == ["a"]
