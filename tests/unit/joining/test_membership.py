"""Who takes part while workers come and go: what is planned, who is waited for, and how long."""

from typing import Any

import pytest

from master.joining.lookout import Lookout
from master.joining.recovery import Membership
from master.joining.shares import Shares
from tpi.errors import NodeLost, PlanError


class Gone:
    """A cluster without workers, to which nobody comes; `waits` counts looks."""

    def __init__(self) -> None:
        self.workers: list[Any] = []
        self.recruits, self.waits, self.weights_sent = self, 0, 0
        self.ready: list[Any] = []

    def part(self, error: object) -> list[Any]:
        return [Worker()]

    def await_recruits(self, seconds: float) -> bool:
        self.waits += 1
        return False


class Worker:
    name, address, key = "a", "127.0.0.1:1", b""


def refuse(shares: object) -> None:
    raise PlanError("master: the model does not fit")


def member(cluster: Any, said: list[str], patience_s: float = 1e9, **more: Any) -> Membership:
    lookout = Lookout(list, lambda address: None)
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
