"""Membership while workers come and go: what is planned, which workers are awaited, and for how long."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from master.joining.discoverythread import DiscoveryThread
from master.joining.probe import WorkerProbe
from master.joining.recovery import Membership
from master.joining.shares import Shares
from master.workers.places import WorkerId
from tpi.errors import NodeLost, PlanError


class Gone:
    """A cluster without workers, to which none comes; `waits` counts the looks for them."""

    def __init__(self) -> None:
        self.workers: list[Any] = []
        self.recruits, self.waits, self.weights_sent = self, 0, 0
        self.ready: list[Any] = []
        self.look_over: Any = None
        self.sought: list[tuple[str, str, bytes]] = []

    def part(self, error: object) -> list[Any]:
        return [Worker()]

    def seek(self, address: str, key: bytes) -> None:
        self.sought.append(("met", address, key))

    def try_announced(self, address: str, key: bytes) -> None:
        self.sought.append(("announced", address, key))

    def await_recruits(self, seconds: float) -> bool:
        self.waits += 1
        return False


class Worker:
    name, address, key = "a", "127.0.0.1:1", b""
    id = WorkerId(address)


def always() -> bool:
    return True


def refuse(shares: object) -> None:
    raise PlanError("master: the model does not fit")


def member(cluster: Any, said: list[str], patience_s: float = 1e9) -> Membership:
    lookout = DiscoveryThread(list, lambda address, key: None)
    scout = WorkerProbe(None, lambda one: cluster.seek(one.address, one.key))
    return Membership(cluster, Shares(1.0, {}), refuse, said.append, patience_s, False, lookout, scout)


def test_patience_lasts_as_long_as_a_request_waits() -> None:
    cluster, said = Gone(), list[str]()
    membership = member(cluster, said)

    def wanted() -> bool:
        return cluster.waits < 3

    with pytest.raises(NodeLost, match=r"all requests have ended before a worker came back; .* does not fit"):
        membership.recover(NodeLost("a", "worker a is lost"), wanted)
    assert cluster.waits == 3
    assert not membership.standing
    with pytest.raises(NodeLost, match="all requests have ended"):  # the next request tries again
        membership.welcome(True, wanted)


@pytest.mark.parametrize(("patience_s", "told"), [(0.0, "0 s"), (0.02, "0.02 s")])
def test_patience_has_an_end(patience_s: float, told: str) -> None:
    said = list[str]()
    with pytest.raises(NodeLost, match=f"no worker came back within {told}; "):
        member(Gone(), said, patience_s=patience_s).recover(NodeLost("a", "worker a is lost"), always)
    assert f"Waiting {told} for workers" in said[-1]


def test_left_out_workers_are_called_if_the_model_does_not_fit() -> None:
    """Before that, such a worker is not called, although it announces itself, because it would slow the others."""
    cluster, slow, new = Gone(), WorkerId("slow:1", b"1" * 32), WorkerId("new:1", b"2" * 32)
    membership = member(cluster, [], patience_s=0.0)
    membership.scout.keep([slow])
    membership.hear(slow.address, slow.key)
    membership.hear(new.address, new.key)
    assert cluster.sought == [("announced", new.address, new.key)]
    with pytest.raises(NodeLost, match="no worker came back"):
        membership.recover(NodeLost("a", "worker a is lost"), always)
    assert cluster.sought[1:] == [("met", slow.address, slow.key)]
    membership.hear(slow.address, slow.key)
    assert cluster.sought[2:] == [("announced", slow.address, slow.key)]


@dataclass
class Machine:
    """A worker on another machine."""

    name: str

    @property
    def key(self) -> bytes:
        return self.name.encode() * 8

    @property
    def id(self) -> WorkerId:
        return WorkerId(f"{self.name}:1", self.key)


class House:
    """A cluster whose master measures new workers; `ready` lists those that came. It also acts as its recruits."""

    def __init__(self, *workers: Machine) -> None:
        self.workers: list[Any] = list(workers)
        self.recruits, self.weights_sent = self, 0
        self.ready: list[Any] = []
        self.dismissed: list[str] = []
        self.unmeasured: list[bool] = []  # whether any worker might be used while workers were awaited
        self.look_over: Any = lambda worker: None

    def join(self) -> list[Any]:
        joined, self.ready = self.ready, []
        self.workers = [*self.workers, *joined]
        return joined

    def dismiss(self, workers: list[Any]) -> None:
        self.dismissed += [one.name for one in workers]
        self.workers = [one for one in self.workers if one not in workers]

    def part(self, error: NodeLost) -> list[Any]:
        gone = [one for one in self.workers if one.name == error.node]
        self.workers = [one for one in self.workers if one not in gone]
        return gone

    def await_recruits(self, seconds: float) -> bool:
        self.unmeasured.append(self.look_over is None)
        self.ready = [Machine("slow")]
        return True


class Rules:
    """A plan by names: a worker in the table is left out while another certain worker is present."""

    def __init__(self, **slows: str) -> None:
        self.slows = slows
        self.met: list[list[str]] = []

    def meet(self, cluster: Any) -> None:
        self.met.append([one.name for one in cluster.workers])

    def among(self, workers: Sequence[WorkerId]) -> list[float]:
        return [1.0] * (1 + len(workers))

    def refused(self, workers: Sequence[WorkerId]) -> dict[WorkerId, str]:
        names = [one.address.partition(":")[0] for one in workers]
        slow = [self.slows.get(name) in ("master", *names) for name in names]
        return {one: "it is slow" for one, out in zip(workers, slow, strict=True) if out}

    def compared(self, workers: Sequence[WorkerId]) -> None:
        return None

    def judge(self, workers: Sequence[WorkerId], seconds: float) -> None:
        raise AssertionError("no step is measured")


@dataclass
class Home:
    """A house with its membership: nodes of each deployment, the messages, and the workers that were called again."""

    house: House
    rules: Rules
    least: int = 1  # nodes that the model needs
    deployed: list[int] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    called: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        lookout, house = DiscoveryThread(list, lambda address, key: None), self.house
        scout = WorkerProbe(None, lambda one: self.called.append(one.address))
        cluster: Any = house
        self.membership = Membership(cluster, self.rules, self.deploy, self.said.append, 60.0, False, lookout, scout)

    def deploy(self, shares: Any) -> None:
        if len(shares) < self.least:
            raise PlanError("master: the model does not fit")
        self.deployed.append(len(shares))

    def comes(self, *names: str) -> None:
        """Let these workers join, and begin the next request."""
        self.house.ready = [Machine(name) for name in names]
        self.membership.welcome(True, always)

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.house.workers]

    @property
    def kept(self) -> list[str]:
        return [one.address.partition(":")[0] for one in self.membership.scout.kept]


def test_a_slowing_worker_is_left_out_and_named_once() -> None:
    home = Home(House(), Rules(slow="master"))
    for _ in range(2):
        home.comes("slow")
        assert home.said == ["slow is not used: it is slow"]
        assert (home.names, home.kept, home.deployed) == ([], ["slow"], [])
    assert home.house.dismissed == ["slow", "slow"]
    home.comes("slow", "fast")
    assert home.said[1:] == ["fast joined; planning anew"]
    assert (home.names, home.kept, home.deployed) == (["fast"], ["slow"], [2])
    home.rules.slows.clear()  # its link is mended
    home.comes("slow")
    assert (home.names, home.kept, home.deployed) == (["fast", "slow"], [], [2, 3])


def test_a_worker_made_useless_by_another_is_let_go() -> None:
    home = Home(House(Machine("old")), Rules(old="fast"))
    home.comes("fast")
    assert (home.names, home.kept, home.house.dismissed) == (["fast"], ["old"], ["old"])
    assert home.deployed == [2]
    assert home.rules.met == [["old", "fast"]]  # how far they are from each other is measured first


def test_a_worker_that_slows_no_other_is_called_after_a_loss() -> None:
    home = Home(House(Machine("fast")), Rules(slow="fast"))
    home.comes("slow")
    assert (home.kept, home.called) == (["slow"], [])
    assert home.membership.recover(NodeLost("fast", "worker fast is lost"), always)
    assert (home.kept, home.called) == ([], ["slow:1"])


def test_a_slow_worker_is_used_while_the_model_needs_it() -> None:
    home = Home(House(Machine("fast")), Rules(slow="fast"), least=2)
    home.comes("slow")
    assert home.membership.recover(NodeLost("fast", "worker fast is lost"), always)
    assert home.called == ["slow:1"]
    assert home.house.unmeasured == [True]
    assert (home.names, home.deployed) == (["slow"], [2])
    assert home.house.look_over is not None
    home.comes("fast")
    assert (home.names, home.kept, home.deployed) == (["fast"], ["slow"], [2, 2])


def test_workers_left_out_of_a_first_plan_are_called_if_needed() -> None:
    home = Home(House(), Rules(slow="master"), least=2)
    home.membership.scout.keep([Machine("slow").id])
    home.membership.begin(optional=False)
    assert (home.called, home.names, home.deployed) == (["slow:1"], ["slow"], [2])
    home = Home(House(), Rules(), least=2)
    with pytest.raises(PlanError, match="does not fit"):
        home.membership.begin(optional=False)


def test_without_measurements_every_worker_is_used() -> None:
    home = Home(House(), Rules(slow="master"))
    home.house.look_over = None  # --split, or --workers
    home.comes("slow")
    assert (home.names, home.deployed) == (["slow"], [2])
