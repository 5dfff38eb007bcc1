"""Workers that are found by announcements: unusable ones are left out by name; last addresses; names."""

import errno
from contextlib import closing, suppress
from pathlib import Path

import pytest
import zmq

from master.joining import discovery
from master.joining.discovery import find_workers, willing_at_home
from master.planning.home.asked import home_asked
from master.workers.asking import ask
from master.workers.cluster import Cluster
from master.workers.dial import Dial
from scheduler.model.machine import LAPTOP
from tests.support.cluster.cluster_helpers import fake_worker, fake_workers, real_worker
from tests.support.cluster.key_helpers import locked, pair_folders
from tests.support.house import until
from tpi.errors import NodeError, NodeRefused, TpiError, UsageError
from tpi.keys.announcement import Announcement
from tpi.keys.identity import load_identity
from tpi.keys.policy import KeyPolicy
from tpi.keys.ring import KeyRing, PairedKey
from tpi.net.messages import Alive
from tpi.net.sockets import Net

NOBODY = "127.0.0.1:9"


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def announce(monkeypatch: pytest.MonkeyPatch, *found: Announcement) -> None:
    """Make mDNS find these workers."""
    monkeypatch.setattr(discovery, "find_workers", lambda policy: list(found))


def test_workers_of_another_master_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, first, second = tmp_path / "here", tmp_path / "first", tmp_path / "second"
    pair_folders(here, first, second)
    said, later = list[str](), list[str]()
    with (
        fake_worker(tmp_path / "a", "--keys", str(first)) as (_, busy),
        fake_worker(tmp_path / "b", "--keys", str(second)) as (_, free),
    ):
        keys = [load_identity(folder).public for folder in (first, second)]
        ports = [port_of(busy), port_of(free)]
        announce(
            monkeypatch, *(Announcement("x", key, port, ("127.0.0.1",)) for key, port in zip(keys, ports, strict=True))
        )
        with Cluster.connect([busy], Net(policy=locked(here))) as other:
            assert willing_at_home(locked(here), said.append, later.append) == [free]
            assert later == [busy]
            assert said == [
                f"going on without first: it is in use by {other.name}",
                f"using second ({free}); --workers none uses no other machine",
            ]
        assert willing_at_home(locked(here), said.append) == [busy, free]


def test_a_worker_that_refuses_late_is_left_out(tmp_path: Path) -> None:
    """The worker was free when it was asked, a moment before."""
    gone: list[NodeError] = []
    with fake_workers([tmp_path / "a", tmp_path / "b"]) as (processes, (busy, free)), Cluster.connect([busy]):
        processes[1].kill()
        processes[1].wait()
        with Cluster.connect([busy, free], without=gone.append) as cluster:
            assert cluster.workers == []
            until(lambda: {one.address for one in cluster.recruits.called} == {busy, free})  # when they can, they help
        with pytest.raises(NodeError):
            Cluster.connect([busy, free])
    assert sorted(type(error).__name__ for error in gone) == ["NodeInUse", "NodeLost"]


def test_a_silent_worker_is_sought_where_it_was_paired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    pair_folders(here, there)
    KeyRing(here).pair(PairedKey("laptop", load_identity(there).public, "127.0.0.1"))
    announce(monkeypatch)
    said: list[str] = []
    with fake_worker(tmp_path / "a", "--keys", str(there)) as (_, address):
        monkeypatch.setattr(discovery, "_PORT", port_of(address))
        assert willing_at_home(locked(here), said.append) == [address]
        assert said == [f"using laptop ({address}); --workers none uses no other machine"]
        assert willing_at_home(KeyPolicy(here), said.append) == []  # a worker on this machine proves no key
    assert willing_at_home(locked(here), said.append) == []
    assert "this machine computes alone" in said[-1]


@pytest.mark.parametrize("problem", [RuntimeError("No interfaces to listen on"), OSError("Network is unreachable")])
def test_without_a_network_no_worker_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    def fail(**options: object) -> object:
        raise problem

    pair_folders(tmp_path / "here", tmp_path / "there")
    monkeypatch.setattr("zeroconf.Zeroconf", fail)
    assert find_workers(KeyPolicy(tmp_path / "here")) == []


def test_a_machine_is_called_as_the_list_of_keys_has_it(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    pair_folders(here, there)
    with (
        fake_worker(tmp_path / "a", "--keys", str(there), "--name", "theirs") as (_, address),
        closing(Net(policy=locked(here))) as net,
    ):
        (one,) = ask(net, [address])
        with Cluster.connect([address], Net(policy=locked(here))) as cluster:
            assert one.name == cluster.workers[0].name == "there"


def test_a_worker_that_revokes_this_machine_says_so(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    with fake_worker(tmp_path / "a", "--keys", str(here)) as (_, address):
        for _ in range(5):  # a machine that stands still reads it too late, and knows of a lost connection alone
            pair_folders(here, there)
            with Cluster.connect([address], Net(policy=locked(there))) as cluster:
                reason = revoked(cluster, here)
            if isinstance(reason, NodeRefused):
                break
        assert f"worker here ({address}) has revoked this machine's key; " in str(reason)
        with pytest.raises(NodeRefused, match=rf"^here at {address} does not accept .*: it was revoked there"):
            Cluster.connect([address], Net(policy=locked(there)), timeout_s=60)


def revoked(cluster: Cluster, worker: Path) -> TpiError | None:
    """Make the worker revoke its master, which goes on sending; return the master's messages about it."""
    KeyRing(worker).revoke("there")
    (one,) = cluster.workers

    def over() -> bool:
        with suppress(NodeError):
            one.send(Alive(cluster.session))
            cluster.poll()
        return one.problem is not None

    until(over)
    return one.problem


def test_a_plan_leaves_out_workers_of_another_master(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with real_worker(tmp_path / "a", "--name", "a") as (_, address), Cluster.connect([address]) as other:
        assert home_asked([address], LAPTOP).names == ("master",)
        assert f"planned without a: it is in use by {other.name}" in capfd.readouterr().err
        other.close()
        until(lambda: home_asked([address], LAPTOP).names == ("master", "a"))


def test_only_the_owner_of_a_key_is_called_at_its_address(tmp_path: Path) -> None:
    """Each trusted key needs a line of its own, because any machine can announce addresses."""
    folders = [tmp_path / name for name in ("here", "b", "c", "d")]
    pair_folders(*folders)
    wanted = load_identity(folders[1]).public
    with closing(Net(policy=locked(folders[0]))) as net:
        for key, lines in ((b"", 4), (wanted, 1)):
            dial = Dial(net, NOBODY, b"x", key)
            assert len(dial.lines) == lines
            assert all(line.key == key or not key for line in dial.lines)
            dial.close()
        KeyRing(folders[0]).revoke("b")
        with pytest.raises(UsageError, match="is not trusted any more"):
            Dial(net, NOBODY, b"x", wanted)


def test_a_process_that_has_too_much_open_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> object:
        raise zmq.ZMQError(errno.EMFILE)

    with closing(Net()) as net:
        for owner, name in ((zmq.Socket, "get_monitor_socket"), (net.context, "socket")):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, full)
                with pytest.raises(UsageError, match=r"Too many open files; raise the limit .* \(ulimit -n 4096\)"):
                    Dial(net, NOBODY, b"x")
