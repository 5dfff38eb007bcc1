"""A machine that is not paired has no effect: no message arrives, no memory grows, and no run slows down."""

import os
import socket
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import psutil
import pytest
import zmq

from master.workers.cluster import Cluster
from tests.support.cluster.cluster_helpers import MadeUpModel, fake_worker, step
from tests.support.cluster.key_helpers import listening, locked, pair_folders, trust
from tests.support.recorder import Recorder
from tpi.errors import UsageError
from tpi.keys.identity import load_identity
from tpi.keys.policy import KeyPolicy
from tpi.keys.ring import KeyRing
from tpi.net.channel import Channel, UnreachableError
from tpi.net.messages import Bye
from tpi.net.sockets import COLLECTIVE, CONTROL, WEIGHTS, Net, Plane, split_address

PLANES = (CONTROL, COLLECTIVE, WEIGHTS)
PATIENCE_S = 20.0  # limit for an admitted connection, on a busy machine
REFUSED_S = 1.0  # limit for a refused connection
QUIET_S = 0.5  # in which a message between two that know each other has long arrived
GREETING = b"\xff" + bytes(7) + b"\x01\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)  # ZMTP 3.1, RFC 37


def says(policy: KeyPolicy, port: int, key: bytes, plane: Plane = CONTROL, seconds: float = PATIENCE_S) -> Net:
    """Send a message to `port` with the keys of `policy`; return the sender, which the caller closes."""
    net = Net(policy=policy)
    dealer = net.connect(plane, "127.0.0.1", port, b"me", key)
    dealer.setsockopt(zmq.SNDTIMEO, int(seconds * 1000))
    with suppress(UnreachableError):  # it is not admitted
        Channel(dealer).send(Bye(7))
    return net


@pytest.mark.parametrize("plane", PLANES)
def test_paired_machines_hear_each_other(tmp_path: Path, plane: Plane) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    pair_folders(here, there)
    with listening(locked(here), plane) as (_, channel, port):
        with closing(says(locked(there), port, load_identity(here).public, plane)):
            assert channel.wait(10) == (b"me", Bye(7))
        assert channel.key == load_identity(there).public


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("stranger", ["unpaired", "paired one way", "another key", "no key at all"])
def test_an_unpaired_peer_and_a_wrong_key_reach_nothing(tmp_path: Path, plane: Plane, stranger: str) -> None:
    here, there, third = tmp_path / "here", tmp_path / "there", tmp_path / "third"
    key = load_identity(here).public
    if stranger == "paired one way":
        trust(there, here)
    if stranger == "another key":
        pair_folders(here, there)
        key = load_identity(third).public
    policy = KeyPolicy(there, locked=stranger != "no key at all") if stranger == "no key at all" else locked(there)
    with listening(locked(here), plane) as (_, channel, port):
        with closing(says(policy, port, b"" if stranger == "no key at all" else key, plane, REFUSED_S)):
            assert channel.wait(QUIET_S) is None
        assert channel.stats.received == channel.stats.malformed == 0


def test_keys_that_cannot_be_looked_up_end_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Meanwhile no key is admitted. A message says so once, and later keys are admitted again."""
    here, there = tmp_path / "here", tmp_path / "there"
    pair_folders(here, there)
    key, policy = load_identity(here).public, locked(here)
    with listening(policy) as (_, channel, port):
        with monkeypatch.context() as broken:
            broken.setattr(KeyRing, "read", lambda ring: Path("/dev/null/keys").stat())
            for _ in range(2):
                with closing(says(locked(there), port, key, seconds=REFUSED_S)):
                    assert channel.wait(QUIET_S) is None
        with closing(says(locked(there), port, key)):
            assert channel.wait(10) == (b"me", Bye(7))
    said = [one.getMessage() for one in caplog.records if one.name == "tpi.net.zap"]
    assert len(said) == 1
    assert "Not a directory" in said[0]


def test_without_a_key_nothing_leaves_the_machine(tmp_path: Path) -> None:
    with (
        closing(Net(policy=KeyPolicy(tmp_path))) as net,
        pytest.raises(UsageError, match=r"192\.0\.2\.1:9990 is on another machine, whose key is not known to this one"),
    ):
        net.connect(CONTROL, "192.0.2.1", 9990, b"me")


def test_a_recorded_session_that_is_played_again_reaches_nothing(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    pair_folders(here, there)
    with listening(locked(here)) as (_, channel, port), Recorder(port) as recorder:
        with closing(says(locked(there), recorder.port, load_identity(here).public)):
            assert channel.wait(10) == (b"me", Bye(7))
        recorded = recorder.sent
        assert len(recorded) > 300  # greeting, HELLO, INITIATE, a message
        assert b"Bye" not in recorded
        received = channel.stats.received
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", port)) as raw:
                raw.sendall(recorded)
                assert channel.wait(QUIET_S) is None
        assert (channel.stats.received, channel.stats.malformed) == (received, 0)


def test_garbage_and_half_messages_reach_nothing(tmp_path: Path) -> None:
    chaos = (
        b"", os.urandom(64), os.urandom(5000), GREETING[:20], GREETING, GREETING + os.urandom(300),
        GREETING + b"\x04\x08\x05HELLO\x01\x00", GREETING + b"\x06" + (1 << 62).to_bytes(8, "big") + bytes(5000),
        GREETING + b"\x02" + (200_000).to_bytes(8, "big") + bytes(50_000), GREETING.replace(b"CURVE", b"NULL\0"),
        GREETING.replace(b"CURVE", b"PLAIN"), b"GET / HTTP/1.1\r\n\r\n",
    )  # fmt: skip
    with listening(locked(tmp_path)) as (_, channel, port):
        for data in chaos * 2:
            with socket.create_connection(("127.0.0.1", port)) as raw:
                raw.sendall(data)
        assert channel.wait(QUIET_S) is None
        assert channel.stats.received == channel.stats.malformed == 0


def test_a_thousand_strangers_take_little_memory_and_stop_no_run(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    pair_folders(here, there)
    model = MadeUpModel()
    with ExitStack() as stack:
        process, address = stack.enter_context(fake_worker(tmp_path / "a", "--keys", str(here)))
        cluster = stack.enter_context(Cluster.connect([address], Net(policy=locked(there))))
        cluster.assign(model.split(cluster.session, 1, cluster.peers(), 8)[1:], model)
        host, port = split_address(address)
        worker = psutil.Process(process.pid)
        before = worker.memory_info().rss
        half = GREETING + b"\x06" + (200_000).to_bytes(8, "big") + bytes(150_000)
        for number in range(1000):
            raw = stack.enter_context(socket.socket())
            raw.settimeout(0.01)
            try:
                raw.connect((host, port))
                raw.sendall(half)
            except OSError:
                pass  # not let in
            if number % 100 == 0:
                cluster.step(step(cluster.session, 1, number // 100))
        assert [stats.steps for stats in cluster.stats()] == [10]
        assert worker.memory_info().rss - before < 16 << 20


def test_a_master_on_the_workers_machine_has_its_key(tmp_path: Path) -> None:
    """A worker that listens to other machines needs a key of each caller. Its owner can read the worker's own key."""
    with (
        fake_worker(tmp_path / "a", "--keys", str(tmp_path / "keys")) as (_, address),
        Cluster.connect([address], Net(policy=KeyPolicy(tmp_path / "keys"))) as cluster,
    ):
        assert cluster.workers[0].key == load_identity(tmp_path / "keys").public
