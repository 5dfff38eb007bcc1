"""Full queues: nobody aborts when the other end is killed, on any plane."""

import subprocess
import sys
from contextlib import ExitStack

from tests.cluster_helpers import ROOT
from tests.deaf import CONNECTIONS, PLANES

_LONGEST_BEAT_S = 1.5  # in which libzmq's own heartbeats, were they on, would meet the end of a connection


def _deaf(stack: ExitStack, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.deaf", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    stack.callback(process.communicate)
    stack.callback(process.kill)
    return process


def test_killed_peers_with_full_queues_take_nobody_with_them() -> None:
    """Over 20 connections end while what they sent is unread: today's libzmq aborts there if its heartbeats are on."""
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
