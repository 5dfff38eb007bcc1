"""A revoked key is refused within a second, even on existing connections; the keys of a plan's peers end with it."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import psutil
import pytest

from master.workers.cluster import Cluster
from tests.support.cluster.cluster_helpers import FAKE_WORKER, MadeUpModel, fake_worker, step
from tests.support.cluster.key_helpers import listening, locked, pair_folders
from tests.support.figures import assert_figures
from tests.support.house import Laptop, until
from tpi.errors import NodeError, NodeRefused
from tpi.keys.identity import load_identity
from tpi.keys.ring import KeyRing
from tpi.net.channel import Channel
from tpi.net.messages import Bye
from tpi.net.sockets import COLLECTIVE, CONTROL, WEIGHTS, Net, Plane, split_address

OUT_S = 1.0
PLANES = (CONTROL, COLLECTIVE, WEIGHTS)  # in the order of their ports
ELSEWHERE = "127.0.0.9"  # the address of a caller that stands for another machine


def test_a_key_revoked_while_connected_is_ignored(tmp_path: Path) -> None:
    """Within a second the connection is closed, its messages are dropped, and no new connection is accepted."""
    here, there = tmp_path / "here", tmp_path / "there"

    def once(number: int) -> dict[str, float]:
        pair_folders(here, there)
        with listening(locked(here)) as (_, channel, port), closing(Net(policy=locked(there))) as net:
            socket, monitor = net.connect_watched(CONTROL, "127.0.0.1", port, b"me", load_identity(here).public)
            speaker = Channel(socket)
            until(lambda: any(monitor.changes()))
            speaker.send(Bye(1))
            assert channel.wait(10) == (b"me", Bye(1))
            KeyRing(here).revoke("there")
            begun, received = time.monotonic(), channel.stats.received
            speaker.send(Bye(2))
            ended: list[bool] = []
            while False not in ended:
                assert channel.wait(0.02) is None
                ended.extend(monitor.changes())
            took = time.monotonic() - begun
            assert channel.stats.received == received
            until(lambda: list(monitor.changes()) == [] and monitor.refused)  # it gets no other
            monitor.close()
        return {"out": took}

    assert_figures("revoked key", {"out": OUT_S}, once)


def test_a_master_that_is_revoked_loses_its_worker(tmp_path: Path) -> None:
    here, there, model = tmp_path / "here", tmp_path / "there", MadeUpModel()
    pair_folders(here, there)
    with (
        fake_worker(tmp_path / "a", "--keys", str(here)) as (_, address),
        Cluster.connect([address], Net(policy=locked(there))) as cluster,
    ):
        cluster.assign(model.split(cluster.session, 1, cluster.peers(), 8)[1:], model)
        cluster.step(step(cluster.session, 1, 0))
        KeyRing(here).revoke("there")
        until(lambda: not cluster.workers[0].connected)
        with pytest.raises(NodeError):
            cluster.step(step(cluster.session, 1, 1))
        with pytest.raises(NodeRefused, match="does not accept this machine's key"):
            Cluster.connect([address], Net(policy=locked(there)), timeout_s=60)
        pair_folders(here, there)
        Cluster.connect([address], Net(policy=locked(there))).close()


def test_a_worker_that_is_revoked_is_not_used_any_more(tmp_path: Path) -> None:
    here, there, model = tmp_path / "here", tmp_path / "there", MadeUpModel()
    pair_folders(here, there)
    with (
        fake_worker(tmp_path / "a", "--keys", str(here)) as (_, address),
        Cluster.connect([address], Net(policy=locked(there))) as cluster,
    ):
        cluster.assign(model.split(cluster.session, 1, cluster.peers(), 8)[1:], model)
        KeyRing(there).revoke("here")
        until(lambda: cluster.workers[0].problem is not None)
        with pytest.raises(NodeRefused, match=r"worker here .* is not used any more: its key was revoked"):
            cluster.poll()


@contextmanager
def worker_behind(folder: Path, cache: Path) -> Iterator[str]:
    """Run a worker process with the keys in `folder`, on three ports in a row; yield its address."""
    laptop = Laptop("a", cache, ("--keys", str(folder)), command=FAKE_WORKER)
    try:
        laptop.start()
        yield laptop.address
    finally:
        laptop.stop()


class Caller:
    """A silent connection, with the keys of a folder, to one plane of the worker at an address."""

    def __init__(self, folder: Path, worker: Path, address: str, plane: Plane, source: str = "") -> None:
        self.net = Net(policy=locked(folder))
        host, port = split_address(address)
        where = f"{source}:0;{host}" if source else host
        number, key = port + PLANES.index(plane), load_identity(worker).public
        self.socket, self.monitor = self.net.connect_watched(plane, where, number, b"me", key)
        self.changes: list[bool] = []
        until(lambda: self.heard() == [True])

    def heard(self) -> list[bool]:
        """Return, for each change so far, True for a connection made and False for a connection lost."""
        self.changes.extend(self.monitor.changes())
        return self.changes

    def close(self) -> None:
        self.monitor.close()
        self.net.close()


def connected_to(address: str, plane: Plane) -> bool:
    """Return True if this process has a connection to a worker's plane."""
    port = split_address(address)[1] + PLANES.index(plane)
    established = (one for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_ESTABLISHED)
    return any(one.raddr.port == port for one in established if one.raddr)


@pytest.mark.parametrize("plane", PLANES, ids=lambda plane: plane.name)
def test_a_revoked_key_loses_silent_connections_too(tmp_path: Path, plane: Plane) -> None:
    """The worker serves no master, and nothing is sent over the connection."""
    here, there = tmp_path / "here", tmp_path / "there"

    def once(number: int) -> dict[str, float]:
        pair_folders(here, there)
        with closing(Caller(there, here, address, plane)) as caller:
            KeyRing(here).revoke("there")
            took = until(lambda: False in caller.heard())
            until(lambda: bool(caller.heard()) and caller.monitor.refused)
            assert True not in caller.heard()[1:]  # it gets no other
        return {"out": took}

    with worker_behind(here, tmp_path / "a") as address:
        assert_figures(f"revoked key, silent, plane of {plane.name}", {"out": OUT_S}, once)


@pytest.mark.parametrize("plane", PLANES, ids=lambda plane: plane.name)
def test_allowed_keys_stay_or_come_back(tmp_path: Path, plane: Plane) -> None:
    """A peer at another address notices nothing. A peer at the address of the revoked machine connects again."""
    here, there, third = tmp_path / "here", tmp_path / "there", tmp_path / "third"
    pair_folders(here, there, third)
    with ExitStack() as stack:
        address = stack.enter_context(worker_behind(here, tmp_path / "a"))
        revoked = stack.enter_context(closing(Caller(third, here, address, plane)))
        beside = stack.enter_context(closing(Caller(there, here, address, plane)))
        apart = stack.enter_context(closing(Caller(there, here, address, plane, ELSEWHERE)))
        KeyRing(here).revoke("third")
        until(lambda: False in revoked.heard())
        until(lambda: beside.heard() == [True, False, True])
        assert apart.heard() == [True]


def test_a_run_goes_on_while_another_key_is_revoked(tmp_path: Path) -> None:
    here, there, third, model = tmp_path / "here", tmp_path / "there", tmp_path / "third", MadeUpModel()
    pair_folders(here, there, third)
    with ExitStack() as stack:
        address = stack.enter_context(worker_behind(here, tmp_path / "a"))
        cluster = stack.enter_context(Cluster.connect([address], Net(policy=locked(there))))
        cluster.assign(model.split(cluster.session, 1, cluster.peers(), 8)[1:], model)
        callers = [stack.enter_context(closing(Caller(third, here, address, each, ELSEWHERE))) for each in PLANES]
        KeyRing(here).revoke("third")
        for number in range(20):
            cluster.step(step(cluster.session, 1, number))
            cluster.poll()
        until(lambda: all(False in caller.heard() for caller in callers))
        assert [stats.steps for stats in cluster.stats()] == [20]
        assert cluster.workers[0].connected


def test_a_revoked_worker_is_not_heard_by_an_idle_master(tmp_path: Path) -> None:
    """On every plane, also on the collective plane, whose thread does nothing until the next request."""
    here, there, model = tmp_path / "here", tmp_path / "there", MadeUpModel()

    def once(number: int) -> dict[str, float]:
        pair_folders(here, there)
        with Cluster.connect([address], Net(policy=locked(there))) as cluster:
            cluster.assign(model.split(cluster.session, 1, cluster.peers(), 8)[1:], model)
            _, port = split_address(address)
            where, key = f"{ELSEWHERE}:0;127.0.0.1", load_identity(here).public  # or it would be no TCP
            _, sums = cluster.net.connect_watched(COLLECTIVE, where, port + 1, b"sums", key)
            until(lambda: all(connected_to(address, plane) for plane in PLANES))
            KeyRing(there).revoke("here")
            took = until(lambda: not any(connected_to(address, plane) for plane in PLANES))
            assert list(sums.changes()) == [True]  # or it would be made again
            assert cluster.workers[0].problem is not None
            sums.close()
        return {"out": took}

    with worker_behind(here, tmp_path / "a") as address:
        assert_figures("revoked worker, of an idle master", {"out": OUT_S}, once)
