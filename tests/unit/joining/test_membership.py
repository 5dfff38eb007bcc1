"""Who takes part while workers come and go: what is planned, who is waited for, and how long."""

from typing import Any

import pytest

from master.joining.lookout import Lookout
from master.joining.recovery import Membership
from master.joining.shares import Shares
from master.workers.places import WorkerId
from tpi.errors import NodeLost, PlanError


class Gone:
    """A cluster without workers, to which nobody comes; `waits` counts looks."""

    def __init__(self) -> None:
        self.workers: list[Any] = []
        self.recruits, self.waits, self.weights_sent = self, 0, 0
        self.ready: list[Any] = []
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


def refuse(shares: object) -> None:
    raise PlanError("master: the model does not fit")


def member(cluster: Any, said: list[str], patience_s: float = 1e9, **more: Any) -> Membership:
    lookout = Lookout(list, lambda address, key: None)
    return Membership(cluster, Shares(1.0, {}), refuse, said.append, patience_s, False, lookout, **more)


def test_patience_lasts_as_long_as_anybody_waits() -> None:
    cluster, said = Gone(), list[str]()
    membership = member(cluster, said, wanted=lambda: cluster.waits < 3)
    with pytest.raises(NodeLost, match=r"nobody waits for workers to come back any more, .* does not fit"):
        membership.recover(NodeLost("a", "worker a is lost"))
    assert cluster.waits == 3
    assert not membership.standing
    with pytest.raises(NodeLost, match="nobody waits"):  # the next request tries again
        membership.welcome(fresh=True)


def test_patience_has_an_end() -> None:
    with pytest.raises(NodeLost, match="nobody came back within 0 s"):
        member(Gone(), [], patience_s=0.0).recover(NodeLost("a", "worker a is lost"))


def test_who_was_left_out_of_the_plan_is_called_where_the_model_does_not_fit() -> None:
    """Until then it is not, however loudly it announces itself: it would slow the others."""
    cluster, slow, new = Gone(), WorkerId("slow:1", b"1" * 32), WorkerId("new:1", b"2" * 32)
    membership = member(cluster, [], patience_s=0.0, reserve=(slow,))
    membership.hear("slow:2", slow.key)
    membership.hear(new.address, new.key)
    assert cluster.sought == [("announced", new.address, new.key)]
    with pytest.raises(NodeLost, match="nobody came back"):
        membership.recover(NodeLost("a", "worker a is lost"))
    assert cluster.sought[1:] == [("met", slow.address, slow.key)]
    membership.hear("slow:2", slow.key)
    assert cluster.sought[2:] == [("announced", "slow:2", slow.key)]
