"""Workers that are called in the background: how often, and when they count as ready."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from master.joining.discoverythread import DiscoveryThread
from master.joining.probe import WorkerProbe
from master.joining.recovery import Membership
from master.joining.shares import Shares
from master.workers.places import WorkerId, WorkerOrder, recognise
from master.workers.recruits import RETRY_S, ROOM_S, Recruits
from master.workers.remote import RemoteWorker
from tpi.errors import NodeInUse, NodeRefused, NodeTwice, PlanError, TpiError
from tpi.keys.text import KEY_BYTES


class Called:
    """A worker that answers at once and has a given memory, or a problem."""

    def __init__(self, address: str, memory: int, problem: TpiError | None = None) -> None:
        self.address = self.name = address
        self.id = WorkerId(address)
        self.key, self.connected, self.idle, self.closed = b"", True, True, False
        self.admitted: bool | None = None
        self.problem = problem
        self.hello: Any = SimpleNamespace(profile=SimpleNamespace(memory_limit=memory, memory_free=0))

    def serve(self) -> None:
        pass

    def close(self, linger_ms: int) -> None:
        self.closed = True


class House:
    """Workers by their addresses, with their present memory or problem."""

    def __init__(self) -> None:
        self.memory: dict[str, int] = {}
        self.problem: dict[str, TpiError] = {}
        self.calls: list[Called] = []

    def call(self, address: str, key: bytes = b"") -> Any:
        self.calls.append(Called(address, self.memory.get(address, 1 << 30), self.problem.get(address)))
        return self.calls[-1]


def test_a_busy_worker_is_called_until_it_is_free() -> None:
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


def test_a_moved_worker_is_called_until_it_forgets_its_master() -> None:
    """A worker that has moved takes its master to be connected still, for a moment."""
    house = House()
    recruits = Recruits(house.call)
    house.problem["a"] = NodeTwice("a", "worker a is given twice")
    recruits.seek("a")
    recruits.tend(0.0)
    house.problem.clear()
    recruits.tend(RETRY_S)
    assert [id(one) for one in recruits.ready] == [id(house.calls[1])]


def test_a_worker_short_of_memory_is_let_go_until_it_has_more() -> None:
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


def test_another_address_of_a_delayed_worker_waits_too() -> None:
    """The worker announces two addresses; a delay at one of them holds at the other."""
    house, key = House(), b"\1" * KEY_BYTES
    recruits = Recruits(house.call)
    house.memory["b"] = 100
    recruits.seek("a", begin_at=60.0, above=112, key=key)
    recruits.try_announced("b", key)
    recruits.tend(59.0)
    assert not house.calls
    recruits.tend(60.0)
    assert [one.address for one in house.calls] == ["a", "b"]
    assert house.calls[1].closed
    assert [one.address for one in recruits.ready] == ["a"]


def test_a_new_worker_counts_once_it_was_measured() -> None:
    house, seen = House(), list[Any]()
    recruits = Recruits(house.call)
    recruits.look_over = seen.append
    recruits.seek("a")
    for now in (0.0, 1.0, 2.0):
        recruits.tend(now)
    assert [id(one) for one in seen] == [id(one) for one in house.calls]  # once
    assert recruits.ready == []
    assert recruits.take() == []
    recruits.look_over = None  # the model does not fit: any worker may help
    assert len(recruits.ready) == 1
    recruits.look_over = seen.append
    seen[0].admitted = True
    assert [id(one) for one in recruits.take()] == [id(one) for one in seen]


class WaitedFor(Recruits):
    """Recruits whose workers may be used from the moment in which one is about to be measured."""

    _look_over: Callable[[RemoteWorker], None] | None = None

    @property
    def look_over(self) -> Callable[[RemoteWorker], None] | None:
        found, self._look_over = self._look_over, None
        return found

    @look_over.setter
    def look_over(self, found: Callable[[RemoteWorker], None] | None) -> None:
        self._look_over = found


def test_reports_may_change_while_a_worker_is_measured() -> None:
    """Another thread changes them: the one that keeps the connections continues."""
    house, seen = House(), list[Any]()
    recruits = WaitedFor(house.call)
    recruits.look_over = seen.append
    recruits.seek("a")
    recruits.tend(0.0)
    recruits.tend(1.0)
    assert [one.address for one in seen] == ["a"]
    assert [one.address for one in recruits.take()] == ["a"]


class Joined:
    """A cluster that some workers have joined; the plan does not fit those that `PlanError` names."""

    def __init__(self, *workers: RemoteWorker) -> None:
        self.workers, self.recruits, self.weights_sent = list(workers), self, 0
        self.ready, self.look_over = list(workers), None
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

    lookout = DiscoveryThread(list, lambda address, key: None)
    scout = WorkerProbe(None, lambda one: None)
    return Membership(cluster, Shares(1.0, {}), deploy, lambda text: None, 0.0, False, lookout, scout)


def workers(house: House) -> list[Any]:
    return [house.call("a"), house.call("b")]


def test_only_a_full_worker_waits_for_memory() -> None:
    for named, full in (("a", ["a"]), ("master", ["a", "b"])):
        cluster = Joined(*workers(House()))
        membership(cluster, PlanError("too little", named)).welcome(True, lambda: True)
        assert cluster.postponed == [(["a", "b"], full)]


def test_a_worker_left_out_at_the_start_is_called_again() -> None:
    cluster = Joined(*workers(House()))
    membership(cluster, PlanError("too little", "b")).begin(optional=True)
    assert cluster.postponed == [(["b"], ["b"])]
    assert [one.name for one in cluster.workers] == ["a"]


LAPTOP, OTHER = b"\1" * KEY_BYTES, b"\2" * KEY_BYTES


class Silent(Called):
    """A worker that does not answer."""

    def __init__(self, address: str) -> None:
        super().__init__(address, 1 << 30)
        self.hello = None


def silent(calls: list[Silent]) -> Callable[[str, bytes], Any]:
    def call(address: str, wanted: bytes) -> Any:
        calls.append(Silent(address))
        return calls[-1]

    return call


@given(st.lists(st.tuples(st.sampled_from([LAPTOP, OTHER]), st.integers(1, 500)), max_size=80))
def test_false_announcements_cause_few_calls(said: list[tuple[bytes, int]]) -> None:
    calls = list[Silent]()
    recruits = Recruits(silent(calls))
    recruits.seek("home:9990", key=LAPTOP)
    for now, (key, port) in enumerate(said):
        recruits.try_announced(f"x:{port}", key)
        recruits.tend(float(now))
        under_way = [one.address for one in calls if not one.closed]
        assert len(under_way) <= 1 + 3 + 3
        assert f"x:{port}" in under_way  # the newest
        assert "home:9990" in under_way  # where it was met
    recruits.close()
    assert all(one.closed for one in calls)


def test_a_found_worker_is_called_nowhere_else() -> None:
    for answers in ("home:9990", "x:3"):

        def call(address: str, wanted: bytes, answers: str = answers) -> Any:
            there = address == answers and wanted == LAPTOP
            called = Called(address, 1 << 30) if there else Silent(address)
            called.key = LAPTOP if there else b""
            return called

        recruits = Recruits(call)
        recruits.seek("home:9990", key=LAPTOP)
        recruits.seek("home:9990", key=OTHER)  # a machine that has moved in there since
        for port in (1, 2, 3):
            recruits.try_announced(f"x:{port}", LAPTOP)
        recruits.try_announced("y:1", OTHER)
        recruits.tend(0.0)
        assert [one.address for one in recruits.take()] == [answers]
        assert sorted(recruits.addresses) == ["home:9990", "y:1"]
        assert not recruits.misses(LAPTOP)
        assert recruits.misses(OTHER)


def test_a_refusing_worker_is_called_seldom() -> None:
    house = House()
    recruits = Recruits(house.call)
    house.problem["a"] = NodeRefused("a", "worker a has revoked this machine's key")
    recruits.seek("a")
    for now in (0.0, RETRY_S, ROOM_S - 1, ROOM_S):
        recruits.tend(now)
    assert len(house.calls) == 2


@pytest.mark.parametrize(
    ("present", "found"),
    [
        ([("a", LAPTOP), ("b", OTHER)], [0, 1]),
        ([("b", LAPTOP), ("a", OTHER)], [0, 1]),  # they have changed addresses
        ([("c", LAPTOP)], [0]),
        ([("c", b"")], [None]),
        ([("127.0.0.1:1", b"")], [2]),
        ([("d", OTHER), ("b", OTHER)], [None, 1]),  # a second worker of that machine
        ([("127.0.0.1:1", OTHER), ("e", OTHER)], [2, 1]),  # its key was not known before
    ],
)
def test_a_returning_worker_is_recognised(present: list[tuple[str, bytes]], found: list[int | None]) -> None:
    known = [WorkerId("a", LAPTOP), WorkerId("b", OTHER), WorkerId("127.0.0.1:1")]
    assert recognise([WorkerId(*one) for one in present], known) == found


IDS = st.builds(WorkerId, st.sampled_from("abcd"), st.sampled_from([b"", LAPTOP, OTHER]))


@given(st.lists(IDS, max_size=5, unique=True), st.lists(IDS, max_size=5, unique=True))
def test_no_two_are_one(present: list[WorkerId], known: list[WorkerId]) -> None:
    found = [index for index in recognise(present, known) if index is not None]
    assert len(set(found)) == len(found)
    assert recognise(known, known) == list(range(len(known)))


def test_a_worker_at_another_address_gets_its_place_back() -> None:
    places = WorkerOrder()
    places.known = [WorkerId("a"), WorkerId("b")]
    first = [SimpleNamespace(id=WorkerId("a", LAPTOP)), SimpleNamespace(id=WorkerId("b", OTHER))]
    assert places.ordered(reversed(first)) == first
    back = [first[1], SimpleNamespace(id=WorkerId("c", LAPTOP)), SimpleNamespace(id=WorkerId("d", b"\3" * 32))]
    assert places.ordered(back) == [back[1], back[0], back[2]]


def test_lines_have_numbers_of_their_own_and_few() -> None:
    places = WorkerOrder()
    assert [places.link(one, ["a", "b"]) for one in "abab"] == [0, 1, 0, 1]
    for number in range(1 << 10):  # an identity has two bytes for them
        assert places.link(f"x{number}", ["b", f"x{number}"]) == 0
    assert places.link("b", ["b"]) == 1
