"""Full queues, floods and too many connections: no process aborts, starves or spins."""

import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from master.workers.cluster import Cluster
from tests.support.cluster.cluster_helpers import MadeUpModel, fake_worker, step
from tests.support.paths import ROOT
from tests.support.processes.deaf import CONNECTIONS, PLANES

_LONGEST_BEAT_S = 1.5  # in which libzmq's own heartbeats, were they on, would meet the end of a connection


def _deaf(stack: ExitStack, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.support.processes.deaf", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    stack.callback(process.communicate)
    stack.callback(process.kill)
    return process


def test_killed_peers_with_full_queues_stop_no_other() -> None:
    """More than 20 connections end with unread data. With its heartbeats on, libzmq aborts the process in this case."""
    assert CONNECTIONS * len(PLANES) > 20
    with ExitStack() as stack:
        victim = _deaf(stack, "victim")
        assert victim.stdin
        assert victim.stdout
        flooder = _deaf(stack, "flood", *victim.stdout.readline().decode().split())
        assert flooder.stdout
        assert flooder.stdout.readline() == b"full\n"
        flooder.kill()
        flooder.wait()
        try:
            victim.wait(_LONGEST_BEAT_S)
        except subprocess.TimeoutExpired:  # it lives
            victim.stdin.write(b"\n")
            victim.stdin.flush()
        assert victim.stdout.readline() == b"read it all\n"


def test_a_storm_of_small_messages_does_not_starve_the_master(tmp_path: Path) -> None:
    model = MadeUpModel()
    with ExitStack() as stack:
        _, address = stack.enter_context(fake_worker(tmp_path / "a"))
        cluster = stack.enter_context(Cluster.connect([address]))
        cluster.assign(model.split(cluster.session, 1, cluster.peers(), 8)[1:], model)
        stormer = _deaf(stack, "storm", address.rpartition(":")[2])
        assert stormer.stdout
        assert stormer.stdout.readline() == b"blows\n"
        for number in range(8):  # for longer than a silent worker is waited for
            cluster.step(step(cluster.session, 1, number))
            assert [stats.steps for stats in cluster.stats()] == [number + 1]
            threading.Event().wait(0.5)


@pytest.mark.alone
@pytest.mark.skipif(sys.platform != "linux", reason="the gate is made of what Linux has")
def test_silent_connections_at_the_descriptor_limit_cost_no_time(tmp_path: Path) -> None:
    model = MadeUpModel()
    with ExitStack() as stack:
        process, address = stack.enter_context(fake_worker(tmp_path / "a", "--descriptors", "300"))
        cluster = stack.enter_context(Cluster.connect([address]))
        cluster.assign(model.split(cluster.session, 1, cluster.peers(), 8)[1:], model)
        host, _, port = address.rpartition(":")
        for _ in range(400):
            silent = stack.enter_context(socket.socket())
            silent.setblocking(False)
            silent.connect_ex((host, int(port)))
        threading.Event().wait(1)  # in which the worker may shut its gate
        before = sum(psutil.Process(process.pid).cpu_times()[:2])
        threading.Event().wait(2)
        assert sum(psutil.Process(process.pid).cpu_times()[:2]) - before < 0.3
        cluster.step(step(cluster.session, 1, 0))
        assert [stats.steps for stats in cluster.stats()] == [1]
