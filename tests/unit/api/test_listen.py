"""The listening socket: what connections have from it."""

import socket

import pytest

from master.api.server import listen
from tpi.errors import UsageError


def test_a_body_does_not_wait_for_the_acknowledgement_of_its_headers() -> None:
    """Nagle's algorithm would hold the second small write of a kept connection back, 40 ms beside delayed ACKs."""
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


def test_what_cannot_be_a_name_is_no_place_to_listen_at() -> None:
    with pytest.raises(UsageError, match=r"--host '192\.\.168\.1\.7' is no name or address"):
        listen("192..168.1.7", 0)
