"""Sockets and channels: explicit options, limits, fences, and clear error messages."""

import signal
import socket as plain
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import zmq

from tests.support.cluster.cluster_helpers import HIDDEN, step
from tpi.errors import UsageError
from tpi.net.channel import Channel, UnreachableError
from tpi.net.codec import FRAME_BYTES, WrongProtocolError, encode, protocol
from tpi.net.messages import Bye, Join
from tpi.net.sockets import COLLECTIVE, CONTROL, WEIGHTS, Net, Plane, split_address

_LARGE = FRAME_BYTES // (4 * HIDDEN)  # tokens of a step whose hidden states fill a frame
_INTERRUPTS = 100  # where frames were not copied one in ten was lost


@pytest.fixture
def net() -> Iterator[Net]:
    opened = Net()
    yield opened
    opened.close()


def pair(net: Net) -> tuple[Channel, Channel]:
    """A bound channel, and a channel connected to it under the identity b"me", which has sent Bye(1)."""
    router, port = net.bind(CONTROL, "127.0.0.1", 0)
    socket, monitor = net.connect_watched(CONTROL, "127.0.0.1", port, b"me")
    while not list(monitor.changes()):
        monitor.events.poll(1000)
    monitor.close()
    bound, connected = Channel(router), Channel(socket)
    connected.send(Bye(1))
    assert bound.wait(5) == (b"me", Bye(1))
    return bound, connected


def _send_forever(channel: Channel) -> None:
    while True:
        channel.send(Bye(1), b"me")


@pytest.mark.parametrize("plane", [CONTROL, WEIGHTS, COLLECTIVE])
@pytest.mark.parametrize("kind", [zmq.ROUTER, zmq.DEALER])
def test_no_unsafe_default_is_left(net: Net, kind: int, plane: Plane) -> None:
    socket = net.open(kind, plane)

    def value(option: int) -> int:
        return int(socket.getsockopt(option))

    assert value(zmq.LINGER) == 0
    assert 0 < value(zmq.MAXMSGSIZE) <= FRAME_BYTES + 64
    assert value(zmq.HEARTBEAT_IVL) == 0
    assert value(zmq.TCP_KEEPALIVE) == 1
    assert value(zmq.TCP_KEEPALIVE_IDLE) * 1000 <= value(zmq.TCP_MAXRT)
    assert value(zmq.SNDTIMEO) >= 0
    assert value(zmq.RCVTIMEO) >= 0
    assert value(zmq.IMMEDIATE) == 1
    assert 0 < value(zmq.SNDHWM) < 1000


def test_messages_go_both_ways(net: Net) -> None:
    bound, connected = pair(net)
    message = step(1, 2, 3, tokens=4)
    bound.send(message, b"me")
    received = connected.wait(5)
    assert received is not None
    assert received[0] == b""
    assert encode(received[1]) == encode(message)
    assert connected.wait(0.01) is None


def test_a_port_in_use_is_named(net: Net) -> None:
    with plain.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} .*in use.*--listen"):
            net.bind(CONTROL, "127.0.0.1", port)


def test_an_address_of_another_machine_is_named(net: Net) -> None:
    with pytest.raises(UsageError, match=r"192\.0\.2\.1.*--listen"):
        net.bind(CONTROL, "192.0.2.1", 0)


def test_sending_without_a_receiver_is_an_error(net: Net) -> None:
    bound, connected = pair(net)
    with pytest.raises(UnreachableError):
        bound.send(Bye(1), b"nobody")
    connected.close()
    with pytest.raises(UnreachableError):
        _send_forever(bound)


def test_junk_is_dropped_and_counted(net: Net) -> None:
    bound, connected = pair(net)
    for junk in ([b""], [b"junk"], [b"\x91\x01", b"x"], [b"\xc1"] * 40):
        connected.socket.send_multipart(junk)
    connected.send(Bye(2))
    assert bound.wait(5) == (b"me", Bye(2))
    assert bound.stats.malformed == 4


def test_an_oversized_frame_ends_the_connection_and_nothing_else(net: Net) -> None:
    bound, connected = pair(net)
    _, port = connected.socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)
    stranger = net.connect(CONTROL, "127.0.0.1", int(port), b"stranger")
    stranger.setsockopt(zmq.SNDTIMEO, 5000)
    stranger.send(bytes(FRAME_BYTES + 1))
    stranger.close(1000)
    connected.send(Bye(3))
    assert bound.wait(5) == (b"me", Bye(3))
    assert bound.wait(0.05) is None


def test_another_protocol_is_seen(net: Net) -> None:
    bound, connected = pair(net)
    frames = encode(Join("v", 1, "m"))
    own, other = (number.to_bytes(4, "big") for number in (protocol(), protocol() ^ 1))
    connected.socket.send_multipart([bytes(frames[0]).replace(own, other, 1)])
    received = bound.wait(5)
    assert received is not None
    assert isinstance(received[1], WrongProtocolError)


def test_a_tap_sees_every_message() -> None:
    seen: list[tuple[str, int]] = []
    net = Net(tap=lambda way, frames: seen.append((way, len(frames))))
    router, port = net.bind(CONTROL, "127.0.0.1", 0)
    bound, connected = Channel(router, net.tap), Channel(net.connect(CONTROL, "127.0.0.1", port, b"me"), net.tap)
    connected.socket.setsockopt(zmq.SNDTIMEO, 5000)
    connected.send(step(1, 1, 1))
    assert bound.wait(5)
    net.close()
    assert seen == [("sent", 2), ("received", 2)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("127.0.0.1:9990", ("127.0.0.1", 9990)), ("laptop.local:1", ("laptop.local", 1)), ("[::1]:80", ("[::1]", 80))],
)
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    assert split_address(text) == expected


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":80", "host:0", "host:99999", "host:-1", "::1:80", "h:1:2", "h:x"]
)
def test_wrong_addresses(text: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        split_address(text)


@pytest.mark.parametrize("share", [False, True])
def test_no_interrupt_is_lost_in_a_message(net: Net, share: bool) -> None:
    bound, connected = pair(net)
    connected = Channel(connected.socket, share=share)
    large = step(1, 1, 3, tokens=_LARGE)
    main, caught = threading.main_thread().ident, 0
    for index in range(_INTERRUPTS):
        aside = threading.Timer(index * 1e-5, signal.pthread_kill, (main, signal.SIGINT))
        ends = time.monotonic() + 10
        try:
            aside.start()
            while time.monotonic() < ends:
                connected.send(large)
                bound.wait(0.01)
        except KeyboardInterrupt:
            caught += 1
        aside.join()
    assert caught == _INTERRUPTS


@pytest.mark.parametrize("method", ["send", "recv"])
def test_an_interrupt_leaves_no_half_message(net: Net, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    bound, connected = pair(net)
    before = getattr(zmq.Socket, method)

    def interrupted(*arguments: Any, **options: Any) -> object:
        """Make a signal interrupt the socket after every frame."""
        done = before(*arguments, **options)
        signal.raise_signal(signal.SIGINT)
        return done

    if method == "recv":
        connected.send(step(1, 1, 1))
        assert bound.socket.poll(5000)
    act = partial(connected.send, step(1, 1, 1)) if method == "send" else bound.receive
    with monkeypatch.context() as patch:
        patch.setattr(zmq.Socket, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            act()
    connected.send(Bye(2))
    received = [bound.wait(5) for _ in range(2 if method == "send" else 1)]
    assert received[-1] == (b"me", Bye(2))
    assert bound.stats.malformed == 0
