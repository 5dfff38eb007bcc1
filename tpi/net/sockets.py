"""ZeroMQ sockets of the control and weights planes: every option explicit, every wait with a deadline, messages typed.

`Net.open` is the one place where a socket gets its options (and where keys for CURVE belong). A `Channel` sends and
receives messages; what is malformed is dropped and counted. Sockets belong to one thread at a time.
"""

import errno
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from tpi.errors import MessageError, UsageError
from tpi.net.codec import FRAME_BYTES, Buffer, WrongProtocolError, decode, encode
from tpi.system.interrupts import deferred

Tap = Callable[[str, Sequence[Buffer]], None]
"""Called with "sent" or "received" and the frames of every message; for tests that look at the wire."""

Socket = zmq.Socket[bytes]
_UNIX_SOCKETS = Path("/proc/net/unix")
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_BATCH_MESSAGES = 64  # malformed ones, dropped in one go before a caller gets its turn
_BATCH_S = 0.01
_STRANGER_BYTES = 4096
_PROBE_S = 60  # between keepalive probes, so that routers on the way remember an idle connection


@dataclass(frozen=True)
class Plane:
    """Limits of the sockets of one plane. Times in milliseconds, high-water marks in messages."""

    name: str
    frame_bytes: int
    high_water: int
    gone_ms: int  # a connection whose other end acknowledges nothing for so long is closed
    send_ms: int = 2000
    local: bool = False  # processes of one machine use a Unix socket, which saves a fifth of the latency

    def local_endpoint(self, port: int) -> str:
        """Where the plane that is bound to `port` listens for processes of this machine (Linux: an abstract name)."""
        return f"ipc://@tpi-{self.name}-{port}"


_DAY_MS = 24 * 3600 * 1000
# Who lives is decided by the heartbeats of the application (tpi.net.messages.Heartbeat and Alive), and only when
# somebody is needed: a connection to a suspended laptop stays, with what is on its way.
CONTROL = Plane("control", frame_bytes=FRAME_BYTES, high_water=256, gone_ms=_DAY_MS)
# What was lost with a connection is asked for again, so this plane may be quick to make another.
WEIGHTS = Plane("weights", frame_bytes=FRAME_BYTES, high_water=16, gone_ms=120_000)
# The collective plane has its own frames (allreduce/native/header.hpp); longer messages travel in segments of 256 KiB.
COLLECTIVE = Plane("collective", frame_bytes=(256 << 10) + 32, high_water=64, gone_ms=_DAY_MS, local=True)


class Net:
    """One process's ZeroMQ context, and how its sockets are made."""

    def __init__(self, tap: Tap | None = None) -> None:
        self.context: zmq.Context[Socket] = zmq.Context(io_threads=1)
        self.tap = tap
        self._sockets: list[Socket] = []  # those that may still be open

    def open(self, kind: int, plane: Plane, identity: bytes = b"") -> Socket:
        """A ROUTER or DEALER with every option set."""
        socket = self.context.socket(kind)
        self._sockets = [*(one for one in self._sockets if not one.closed), socket]
        options = {
            zmq.LINGER: 0,
            zmq.MAXMSGSIZE: plane.frame_bytes,
            zmq.SNDHWM: plane.high_water,
            zmq.RCVHWM: plane.high_water,
            zmq.SNDTIMEO: plane.send_ms,
            zmq.RCVTIMEO: 0,
            zmq.IMMEDIATE: 1,
            # libzmq 4.3.5 aborts where its own meet a connection that ended while our queue was full (libzmq#4364)
            zmq.HEARTBEAT_IVL: 0,
            zmq.TCP_KEEPALIVE: 1,
            zmq.TCP_KEEPALIVE_IDLE: _PROBE_S,
            zmq.TCP_KEEPALIVE_INTVL: _PROBE_S,
            zmq.TCP_KEEPALIVE_CNT: min(127, plane.gone_ms // (1000 * _PROBE_S)),  # where `TCP_MAXRT` does not count
            zmq.TCP_MAXRT: plane.gone_ms,
            zmq.HANDSHAKE_IVL: 5000,
            zmq.CONNECT_TIMEOUT: 5000,
            zmq.RECONNECT_IVL: 100,
            zmq.RECONNECT_IVL_MAX: 1000,
            zmq.BACKLOG: 64,
        }
        for option, value in options.items():
            socket.setsockopt(option, value)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if identity:
            socket.setsockopt(zmq.IDENTITY, identity)
        return socket

    def bind(self, plane: Plane, host: str, port: int) -> tuple[Socket, int]:
        """A bound ROUTER and its port; `port` 0 takes a free one.

        Raises:
            UsageError: if the port is in use or the address is not this machine's.
        """
        socket = self.open(zmq.ROUTER, plane)
        _allow_ipv6(socket, host)
        try:
            socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            socket.close(0)
            raise UsageError(_bind_problem(error.errno, plane, host, port)) from None
        port = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        if plane.local and _UNIX_SOCKETS.exists():
            with suppress(zmq.ZMQError):  # the network address does as well
                socket.bind(plane.local_endpoint(port))
        return socket, port

    def connect(self, plane: Plane, host: str, port: int, identity: bytes) -> Socket:
        """A DEALER that connects, and goes on trying, in the background."""
        socket = self.open(zmq.DEALER, plane, identity)
        _connect(socket, plane, host, port)
        return socket

    def connect_watched(self, plane: Plane, host: str, port: int, identity: bytes) -> tuple[Socket, "Monitor"]:
        """As `connect`, with a monitor that misses nothing."""
        socket = self.open(zmq.DEALER, plane, identity)
        monitor = Monitor(socket)
        _connect(socket, plane, host, port)
        return socket, monitor

    def close(self) -> None:
        """Close every socket that is still open, and the context."""
        for socket in self._sockets:
            socket.close(0)
        self.context.destroy(linger=0)


def _connect(socket: Socket, plane: Plane, host: str, port: int) -> None:
    _allow_ipv6(socket, host)
    local = plane.local and host in _LOOPBACK and _listens_locally(plane.local_endpoint(port))
    try:
        socket.connect(plane.local_endpoint(port) if local else f"tcp://{host}:{port}")
    except zmq.ZMQError as error:
        socket.close(0)
        raise UsageError(f"{host}:{port} is not an address: {os.strerror(error.errno or 0)}; give HOST:PORT") from None


def _listens_locally(endpoint: str) -> bool:
    """Whether a process of this machine listens at `endpoint`; a loopback address may as well be a forwarded port."""
    try:
        return _UNIX_SOCKETS.read_text().find(f" {endpoint.removeprefix('ipc://')}\n") >= 0
    except OSError:
        return False


def _allow_ipv6(socket: Socket, host: str) -> None:
    socket.setsockopt(zmq.IPV6, int(":" in host))


def _bind_problem(number: int | None, plane: Plane, host: str, port: int) -> str:
    if number == errno.EADDRINUSE:
        return f"port {port} on {host} (the {plane.name} plane) is in use; give another one with --listen {host}:PORT"
    if number in (errno.EACCES, errno.EPERM):
        return f"port {port} on {host} needs privileges; give one above 1023 with --listen"
    return f"cannot listen on {host}:{port}: {os.strerror(number or 0)}; give an address of this machine with --listen"


def split_address(address: str, lowest_port: int = 1) -> tuple[str, int]:
    """Host and port of `HOST:PORT` or `[IPV6]:PORT`.

    Raises:
        UsageError: if it is neither, or the port is below `lowest_port`.
    """
    host, separator, digits = address.rpartition(":")
    known = separator and digits.isdecimal() and lowest_port <= int(digits) <= 65535
    if not known or not host or (":" in host and not (host.startswith("[") and host.endswith("]"))):
        raise UsageError(f"{address!r} is not an address; write HOST:PORT, for example 192.168.1.7:9990")
    return host, int(digits)


@dataclass
class ChannelStats:
    """Counts since the channel was opened."""

    sent: int = 0
    received: int = 0
    malformed: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


def _receive_whole(socket: Socket) -> list[bytes] | None:
    """The frames of the next message, if there is one now; an interrupt waits for the last of them."""
    if not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
        return None
    with deferred():
        return socket.recv_multipart(zmq.NOBLOCK)


class Monitor:
    """Tells when a connecting socket gets and loses its connection. Made before it connects; used by its thread."""

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self.events: Socket = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)

    def changes(self) -> Iterator[bool]:
        """True for every connection made since the last call, False for every one lost, in order."""
        while (frames := _receive_whole(self.events)) is not None:
            # zmq_socket_monitor(3): 16 bits of event, 32 of value; zmq.utils.monitor would do it, but imports asyncio
            yield int.from_bytes(frames[0][:2], sys.byteorder) == zmq.EVENT_HANDSHAKE_SUCCEEDED

    def close(self) -> None:
        """Stop watching; before the socket is closed."""
        self._socket.disable_monitor()
        self.events.close()


class UnreachableError(MessageError):
    """No connection to the receiver, or its queue stayed full."""


class FullError(UnreachableError):
    """The receiver's queue stayed full, or (on a DEALER) there is no connection."""


class Channel:
    """Typed messages over one ROUTER or DEALER. Used by one thread at a time.

    What is received is a copy: an interrupt that meets pyzmq in the destructor of a `zmq.Frame` is printed, and lost.
    """

    def __init__(self, socket: Socket, tap: Tap | None = None, share: bool = False) -> None:
        """`share`: large frames are sent from the message's own memory, which must not change afterwards."""
        self.socket = socket
        self._share = share
        self.stats = ChannelStats()
        self.known: Callable[[bytes], bool] | None = None
        """Whether a peer's messages may be long; None: everyone's. A stranger's are read only as far as a Join goes."""
        self._router = socket.getsockopt(zmq.TYPE) == zmq.ROUTER
        self._tap = tap

    def send(self, message: object, peer: bytes = b"") -> None:
        """Queue a message; `peer` is the receiver's identity, on a ROUTER only.

        Raises:
            UnreachableError: if the peer is gone, or its queue stays full for the plane's send timeout.
        """
        self.send_frames(encode(message), peer)

    def send_frames(self, frames: list[Buffer], peer: bytes = b"") -> None:
        """As `send`, for a message that was encoded once for several receivers."""
        if self._tap:
            self._tap("sent", frames)
        try:
            self._send([peer, *frames] if self._router else frames)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EAGAIN, errno.EHOSTUNREACH):
                raise
            kind = FullError if error.errno == errno.EAGAIN else UnreachableError
            raise kind(f"no connection: {os.strerror(error.errno)}") from None
        self.stats.sent += 1
        self.stats.sent_bytes += sum(map(len, frames))

    def offer(self, message: object, peer: bytes = b"") -> bool:
        """As `send`, without waiting: False if the receiver's queue is full.

        Raises:
            UnreachableError: if the peer is gone (on a ROUTER).
        """
        if not self._router and not int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
            return False
        timeout = self.socket.sndtimeo
        self.socket.sndtimeo = 0
        try:
            self.send(message, peer)
        except FullError:
            return False
        finally:
            self.socket.sndtimeo = timeout
        return True

    def receive(self) -> tuple[bytes, Any] | None:
        """The next message with its sender's identity (empty on a DEALER), or None if there is none now.

        Malformed messages are dropped and counted, as are those of strangers that are long; one of another protocol
        comes as the `WrongProtocolError` itself. None may also mean that there was nothing but such messages for
        a while: whoever sends them gets no more than its share of the caller's time.
        """
        ends = 0.0
        for _ in range(_BATCH_MESSAGES):
            parts = _receive_whole(self.socket)
            if parts is None:
                return None
            peer = parts.pop(0) if self._router else b""
            message = self._decoded(parts) if self._admitted(peer, parts) else None
            if message is not None:
                return peer, message
            ends = ends or time.monotonic() + _BATCH_S
            if time.monotonic() > ends:
                return None
        return None

    def batch(self) -> Iterator[tuple[bytes, Any]]:
        """What has come, as `receive` gives it, for a short while: the caller has more to do than to listen."""
        ends = 0.0
        for _ in range(_BATCH_MESSAGES):
            received = self.receive()
            if received is None:
                return
            ends = ends or time.monotonic() + _BATCH_S
            yield received
            if time.monotonic() > ends:
                return

    def wait(self, seconds: float) -> tuple[bytes, Any] | None:
        """As `receive`, waiting up to `seconds`."""
        ends = time.monotonic() + seconds
        while (received := self.receive()) is None:
            left = ends - time.monotonic()
            if left <= 0:
                return None
            self.socket.poll(max(1, int(left * 1000)))
        return received

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket; what is queued has `linger_ms` to get out."""
        self.socket.close(linger_ms)

    def _send(self, frames: list[Buffer]) -> None:
        with deferred():  # what comes after half a message would be taken for its rest
            self.socket.send_multipart(frames, copy=not self._share)

    def _admitted(self, peer: bytes, frames: list[bytes]) -> bool:
        if self.known is None or (len(frames) == 1 and len(frames[0]) <= _STRANGER_BYTES) or self.known(peer):
            return True
        self.stats.malformed += 1
        return False

    def _decoded(self, frames: list[bytes]) -> Any:
        if self._tap:
            self._tap("received", frames)
        try:
            message = decode(frames)
        except WrongProtocolError as error:
            return error
        except MessageError:
            self.stats.malformed += 1
            return None
        self.stats.received += 1
        self.stats.received_bytes += sum(map(len, frames))
        return message
