"""Peers by the address that they connected from, so that connections of refused keys can be found."""

import errno
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.support.cluster.key_helpers import locked, pair_folders
from tests.support.house import until
from tpi.keys.identity import load_identity
from tpi.keys.knownpeers import KnownPeers, caller
from tpi.keys.ring import KeyRing
from tpi.net.monitor import end_connection, peer_address, receive_keyed
from tpi.net.sockets import CONTROL, Net


@pytest.mark.parametrize(
    ("written", "means"),
    [("192.0.2.7", "192.0.2.7"), ("::ffff:192.0.2.7", "192.0.2.7"), ("fe80::1%eth0", "fe80::1"), ("::1", "::1"),
     ("localhost:0:0:123", ""), ("", "")],
)  # fmt: skip
def test_an_address_has_one_name(written: str, means: str) -> None:
    assert caller(written) == means


def test_only_places_that_a_refused_key_came_from_are_forgotten() -> None:
    callers, here, there = KnownPeers(), ("control", "192.0.2.1"), ("control", "192.0.2.2")
    assert callers.come(here, b"good")
    assert callers.come(here, b"bad")
    assert not callers.come(here, b"good")
    callers.come(there, b"good")
    callers.come(there, b"stranger")
    callers.leave(there, b"stranger")  # it was not let in
    assert callers.dismiss(lambda plane, keys: b"good" not in keys) == set()
    assert callers.dismiss(lambda plane, keys: bool({b"bad", b"stranger"} & set(keys))) == {here}
    assert callers.dismiss(lambda plane, keys: True) == {there}


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_connections_end_where_a_refused_key_came_from(tmp_path: Path, host: str) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    pair_folders(here, there)
    with closing(Net(policy=locked(here))) as bound, closing(Net(policy=locked(there))) as calling:
        _, port = bound.bind(CONTROL, host, 0)
        _, monitor = calling.connect_watched(CONTROL, host, port, b"me", load_identity(here).public)
        until(lambda: True in monitor.changes())
        assert not bound.disconnect_refused()
        KeyRing(here).revoke("there")
        assert bound.disconnect_refused()
        until(lambda: False in monitor.changes())
        monitor.close()


class Reset:
    """A socket with one message, whose connection was reset before libzmq asked for its address."""

    rcvmore, bytes = False, b"hello"

    def getsockopt(self, option: int) -> int:
        return zmq.POLLIN if option == zmq.EVENTS else 0

    def recv(self, flags: int, copy: bool) -> "Reset":
        return self

    def get(self, what: object) -> int:
        raise zmq.ZMQError(errno.EINVAL)


def test_a_message_of_a_forgotten_connection_is_received() -> None:
    socket: Any = Reset()
    assert receive_keyed(socket) == ([b"hello"], b"", -1)
    assert peer_address(-1) == ""
    end_connection(-1)
