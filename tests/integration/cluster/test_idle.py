"""Idle masters, stopped masters and silent workers: waiting causes no errors, and real silence is still noticed."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from allreduce.base import GroupSpec, Peer
from allreduce.deadline import Deadlines
from master.workers import heartbeats, remote
from master.workers.cluster import Cluster
from master.workers.heartbeats import HeartbeatState, RoundTrip
from tests.support.cluster.cluster_helpers import MadeUpModel, fake_worker, fake_workers, step
from tests.support.paths import ROOT
from tpi import __version__
from tpi.errors import NodeLost, NodeRefused
from tpi.net.channel import Channel, UnreachableError
from tpi.net.messages import Join, Refuse, master_identity
from tpi.net.sockets import CONTROL, Net
from tpi.system import clocks
from worker.service import lease
from worker.service.lease import KEEP_S, YIELD_S, Lease

_STOPPED_S = 5.5  # longer than libzmq's heartbeats, when they were on, waited


class Clock:
    """A clock that shows the time that a test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replace `since_boot` by a `Clock` in all modules."""
    stepped = Clock()
    for module in (clocks, lease, remote, sys.modules["allreduce.deadline"]):
        monkeypatch.setattr(module, "since_boot", stepped)
    return stepped


def until(true: Callable[[], bool], seconds: float = 20) -> None:
    waited = threading.Event()
    for _ in range(int(seconds / 0.02)):
        if true():
            return
        waited.wait(0.02)
    raise AssertionError("it did not come to that")


@contextmanager
def idle_master(*addresses: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a master in a process of its own until the end of the block; yield it once it is ready."""
    command = [sys.executable, "-m", "tests.support.processes.idle_master", *addresses]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def told(process: subprocess.Popen[bytes]) -> str:
    """Write a line to a master and return the line that it prints."""
    assert process.stdin
    assert process.stdout
    process.stdin.write(b"\n")
    process.stdin.flush()
    return process.stdout.readline().decode().strip()


def stand_still(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    threading.Event().wait(seconds)
    os.kill(pid, signal.SIGCONT)


def test_an_idle_master_hears_its_workers(tmp_path: Path) -> None:
    model = MadeUpModel()
    with fake_worker(tmp_path / "a") as (_, address), Cluster.connect([address]) as cluster:
        cluster.assign(model.split(cluster.session, 1, cluster.peers(), 8)[1:], model)
        told_of = cluster.workers[0].heartbeats
        seen = told_of.seen
        until(lambda: told_of.seen > seen + 1)  # the cluster is not called
        cluster.step(step(cluster.session, 1, 0))
        assert [stats.steps for stats in cluster.stats()] == [1]


def test_weights_travel_while_the_master_does_something_else(tmp_path: Path) -> None:
    model = MadeUpModel()
    with fake_worker(tmp_path / "a") as (_, address), Cluster.connect([address]) as cluster:
        cluster.begin(model.split(cluster.session, 1, cluster.peers(), 8)[1:], model)
        until(lambda: cluster.workers[0].ready is not None)
        ready, feeder = cluster.workers[0].ready, cluster.workers[0].feeder
        assert ready is not None
        assert feeder is not None
        assert feeder.stats.sent == ready.fetched_bytes > 0


def test_an_idle_workers_silence_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MadeUpModel()
    with fake_worker(tmp_path / "a") as (process, address), Cluster.connect([address]) as cluster:
        cluster.assign(model.split(cluster.session, 1, cluster.peers(), 8)[1:], model)
        monkeypatch.setattr(heartbeats, "SILENCE_S", 1.0)  # of what follows, not of connecting on a busy machine
        stand_still(process.pid, 3)
        cluster.step(step(cluster.session, 1, 0))
        assert [stats.steps for stats in cluster.stats()] == [1]


def test_a_loss_while_idle_is_reported_with_the_next_run(tmp_path: Path) -> None:
    model = MadeUpModel()
    with fake_worker(tmp_path / "a") as (process, address), Cluster.connect([address]) as cluster:
        cluster.assign(model.split(cluster.session, 1, cluster.peers(), 8)[1:], model)
        process.kill()
        until(lambda: not cluster.workers[0].connected)
        with pytest.raises(NodeLost, match="it closed the connection"):
            cluster.step(step(cluster.session, 1, 0))


def test_a_stopped_master_goes_on(tmp_path: Path) -> None:
    with fake_workers([tmp_path / "a", tmp_path / "b"]) as (_, addresses), idle_master(*addresses) as master:
        assert told(master) == "[1, 1]"
        stand_still(master.pid, _STOPPED_S)
        assert told(master) == "[2, 2]"


def test_a_silent_master_is_left_for_another_and_told(tmp_path: Path) -> None:
    with (
        fake_worker(tmp_path / "a", "--yields", "3") as (_, address),
        idle_master(address) as master,
    ):
        with pytest.raises(NodeRefused, match="in use by"):
            Cluster.connect([address])
        os.kill(master.pid, signal.SIGSTOP)

        def served() -> bool:
            try:
                Cluster.connect([address]).close()
            except NodeRefused:
                return False
            return True

        until(served, 60)
        os.kill(master.pid, signal.SIGCONT)
        assert "in use by" in told(master)


def test_a_worker_that_slept_is_not_given_to_another_master(clock: Clock) -> None:
    held = Lease()
    clock.now += 300  # asleep
    assert not held.may_be_replaced()
    for _ in range(int(YIELD_S) + 1):
        clock.now += 1
        held.heartbeat_divisor()
    assert held.may_be_replaced()
    assert held.heartbeat_divisor() > 1
    held.renew()
    assert not held.may_be_replaced()
    assert held.heartbeat_divisor() == 1


def test_a_master_is_kept_for_a_day(clock: Clock) -> None:
    held = Lease()
    clock.now += KEEP_S - 1
    assert not held.has_expired()
    clock.now += 2
    assert held.has_expired()


def test_a_worker_that_is_needed_may_be_silent_for_seconds_only() -> None:
    heard = HeartbeatState()
    heard.look(100)
    heard.hear(100)
    for now in range(1001, 2000, 2):
        heard.look(now / 10)
    heard.ask(200)
    assert not heard.silent(202)
    assert heard.silent(203)


@pytest.mark.parametrize(("round_trip", "limit"), [(0.0, 2.5), (0.04, 2.5), (0.4, 9.0), (60.0, 18.0)])
def test_a_far_worker_has_time_for_three_retransmissions(round_trip: float, limit: float) -> None:
    """The deadline follows from how long earlier answers took, because that tells how often TCP sends again."""
    heard = HeartbeatState(link=RoundTrip(round_trip), seen=100, asked=100)
    assert not heard.silent(100 + limit - 0.1)
    assert heard.silent(100 + limit + 0.1)


@pytest.mark.parametrize(("stopped", "grace"), [(2, 2), (300, 120), (86_400, 120)])
def test_workers_have_time_to_answer_after_a_pause_of_the_master(stopped: float, grace: float) -> None:
    """TCP sends again after at most as long as the machine slept, because its pauses double."""
    heard = HeartbeatState(asked=100)
    heard.look(100)
    heard.hear(100)
    heard.look(100 + stopped)
    assert not heard.silent(100 + stopped + grace + heartbeats.SILENCE_S - 0.1)
    assert heard.silent(100 + stopped + grace + heartbeats.SILENCE_S + 0.1)


def test_a_pause_in_a_sum_is_nobodys_fault(clock: Clock) -> None:
    peers = (Peer(0, "master"), Peer(1, "a"))
    patience = Deadlines(GroupSpec(0, 1, 1, peers, timeout_s=3), None)
    deadline = patience(1, 0)
    clock.now += 300
    deadline = patience(1, deadline)
    for _ in range(30):
        clock.now += 0.09
        deadline = patience(1, deadline)
    clock.now += 0.9
    with pytest.raises(NodeLost, match=r"a \(rank 1\) did not answer for 3 s"):
        patience(1, deadline)


def test_a_machine_that_has_moved_is_met_again_by_its_master(tmp_path: Path) -> None:
    """The worker still has a dead connection to its master. It accepts the same key and session, and refuses others."""
    with fake_worker(tmp_path / "a") as (_, address), closing(Net()) as net:
        port = int(address.rpartition(":")[2])

        def calls(session: int, link: int) -> Channel:
            channel = Channel(net.connect(CONTROL, "127.0.0.1", port, master_identity(session, link)))
            until(lambda: sent(channel, Join(__version__, session, "the master")))
            return channel

        def refusal(channel: Channel) -> str:
            """Return the reason why the worker refused the connection; empty if it accepted."""
            until(lambda: bool(channel.socket.poll(0)))
            answer = next(message for _, message in channel.receive_batch())
            return answer.reason if isinstance(answer, Refuse) else ""

        assert refusal(calls(7, 0)) == ""
        assert refusal(calls(7, 1)) == "twice"  # its master was heard a moment ago
        until(lambda: refusal(calls(7, 1)) == "")
        assert refusal(calls(8, 0)) == "in use"


def sent(channel: Channel, message: object) -> bool:
    with suppress(UnreachableError):
        return bool(channel.offer(message))
    return False
