"""A revoked key is out within a second, connections that stand included; guests come and go with their plan."""

import time
from contextlib import closing
from pathlib import Path

import pytest

from master.workers.cluster import Cluster
from tests.support.cluster.cluster_helpers import MadeUpModel, fake_worker, step
from tests.support.cluster.key_helpers import listening, locked, pair_folders
from tests.support.figures import assert_figures
from tests.support.house import until
from tpi.errors import NodeError, NodeRefused
from tpi.keys.identity import load_identity
from tpi.keys.ring import KeyRing
from tpi.net.channel import Channel
from tpi.net.messages import Bye
from tpi.net.sockets import CONTROL, Net

OUT_S = 1.0


def test_who_is_revoked_while_connected_is_not_heard_any_more(tmp_path: Path) -> None:
    """In a second: the connection that stood is ended, what came over it is dropped, and there is no other."""
    here, there = tmp_path / "here", tmp_path / "there"

    def once(number: int) -> dict[str, float]:
        pair_folders(here, there)
        with listening(locked(here)) as (_, channel, port), closing(Net(door=locked(there))) as net:
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
        Cluster.connect([address], Net(door=locked(there))) as cluster,
    ):
        cluster.assign(model.split(cluster.session, 1, cluster.peers(), 8)[1:], model)
        cluster.step(step(cluster.session, 1, 0))
        KeyRing(here).revoke("there")
        until(lambda: not cluster.workers[0].connected)
        with pytest.raises(NodeError):
            cluster.step(step(cluster.session, 1, 1))
        with pytest.raises(NodeRefused, match="does not let this machine's key"):
            Cluster.connect([address], Net(door=locked(there)), timeout_s=60)
        pair_folders(here, there)
        Cluster.connect([address], Net(door=locked(there))).close()


def test_a_worker_that_is_revoked_is_not_used_any_more(tmp_path: Path) -> None:
    here, there, model = tmp_path / "here", tmp_path / "there", MadeUpModel()
    pair_folders(here, there)
    with (
        fake_worker(tmp_path / "a", "--keys", str(here)) as (_, address),
        Cluster.connect([address], Net(door=locked(there))) as cluster,
    ):
        cluster.assign(model.split(cluster.session, 1, cluster.peers(), 8)[1:], model)
        KeyRing(there).revoke("here")
        until(lambda: cluster.workers[0].problem is not None)
        with pytest.raises(NodeRefused, match=r"worker here .* is not used any more: its key was revoked"):
            cluster.poll()
