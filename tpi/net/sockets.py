"""ZeroMQ sockets with every option set explicitly. Connections between machines are encrypted and need known keys.

`Net` is the only place that sets a socket's options and keys. A socket belongs to one thread at a time.
`tpi.net.channel` sends messages over sockets.
"""

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import zmq

from tpi.errors import UsageError
from tpi.keys.policy import KeyPolicy
from tpi.keys.text import KEY_BYTES
from tpi.net.codec import FRAME_BYTES, Buffer
from tpi.net.monitor import Monitor, Socket, end_connections
from tpi.net.zap import ZapHandler

Tap = Callable[[str, Sequence[Buffer]], None]
"""Callback that gets "sent" or "received" and the frames of every message; for tests that inspect the traffic."""

_UNIX_SOCKETS = Path("/proc/net/unix")
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_CURVE_BYTES = 64  # upper limit of the bytes that encryption adds to a frame (ZeroMQ RFC 26: 33)
_PROBE_S = 60  # between keepalive probes, so that routers on the path keep an idle connection


@dataclass(frozen=True)
class Plane:
    """Limits of the sockets of one plane. Times in milliseconds, high-water marks in messages."""

    name: str
    frame_bytes: int
    high_water: int
    gone_ms: int  # a connection is closed if its other end acknowledges nothing for this long
    send_ms: int = 2000
    local: bool = False  # processes on one machine use a Unix socket, which saves a fifth of the latency

    def local_endpoint(self, port: int) -> str:
        """Return the endpoint for processes on this machine of the plane bound to `port` (Linux: an abstract name)."""
        return f"ipc://@tpi-{self.name}-{port}"


_DAY_MS = 24 * 3600 * 1000
# The application's own heartbeats (tpi.net.messages.Heartbeat and Alive) detect lost nodes, and only while a node is
# needed. So a connection to a suspended laptop stays open, with the messages that are on their way.
CONTROL = Plane("control", frame_bytes=FRAME_BYTES, high_water=256, gone_ms=_DAY_MS)
# Data lost with a connection is requested again, so this plane may close and reconnect early.
WEIGHTS = Plane("weights", frame_bytes=FRAME_BYTES, high_water=16, gone_ms=120_000)
# The collective plane has its own frames (allreduce/native/header.hpp); longer messages travel in segments of 256 KiB.
COLLECTIVE = Plane("collective", frame_bytes=(256 << 10) + 32, high_water=64, gone_ms=_DAY_MS, local=True)


class Net:
    """One process's ZeroMQ context, which makes its sockets."""

    def __init__(self, tap: Tap | None = None, policy: KeyPolicy | None = None) -> None:
        """Create the context.

        `policy` decides which connections need keys, and has the keys (None: the user's own). `tap` sees the frames
        of every message.
        """
        self.context: zmq.Context[Socket] = zmq.Context(io_threads=1)
        self.tap = tap
        self.policy = policy or KeyPolicy()
        self._sockets: list[Socket] = []  # those that may still be open
        self._zap: ZapHandler | None = None
        self._guarded: set[tuple[Plane, int]] = set()  # ports

    def open(self, kind: int, plane: Plane, identity: bytes = b"") -> Socket:
        """Return a new socket with every option set; `kind` is `zmq.ROUTER` or `zmq.DEALER`, `identity` its routing id.

        Raises:
            UsageError: if this process has too many files open.
        """
        try:
            socket = self.context.socket(kind)
        except zmq.ZMQError as error:
            raise UsageError(_crowded(error)) from None
        self._sockets = [*(one for one in self._sockets if not one.closed), socket]
        options = {
            zmq.LINGER: 0,
            zmq.MAXMSGSIZE: plane.frame_bytes,
            zmq.SNDHWM: plane.high_water,
            zmq.RCVHWM: plane.high_water,
            zmq.SNDTIMEO: plane.send_ms,
            zmq.RCVTIMEO: 0,
            zmq.IMMEDIATE: 1,
            # off: libzmq 4.3.5 aborts if a heartbeat is due after a connection ended with a full queue (libzmq#4364)
            zmq.HEARTBEAT_IVL: 0,
            zmq.TCP_KEEPALIVE: 1,
            zmq.TCP_KEEPALIVE_IDLE: _PROBE_S,
            zmq.TCP_KEEPALIVE_INTVL: _PROBE_S,
            zmq.TCP_KEEPALIVE_CNT: min(127, plane.gone_ms // (1000 * _PROBE_S)),  # for systems without `TCP_MAXRT`
            zmq.TCP_MAXRT: plane.gone_ms,
            zmq.HANDSHAKE_IVL: 5000,
            zmq.CONNECT_TIMEOUT: 5000,
            zmq.RECONNECT_IVL: 100,
            zmq.RECONNECT_IVL_MAX: 1000,
            zmq.BACKLOG: 16,
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
        """Return a bound ROUTER and its port; `port` 0 takes a free one.

        Raises:
            UsageError: if the port is in use, the address is not this machine's, or this machine's key is unusable.
        """
        guarded = self.policy.guards(host)
        socket = self.open(zmq.ROUTER, plane)
        if guarded:
            self._guard(socket, plane)
        _allow_ipv6(socket, host)
        try:
            socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            socket.close(0)
            raise UsageError(_bind_problem(error.errno, plane, host, port)) from None
        port = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        if plane.local and _UNIX_SOCKETS.exists():
            with suppress(zmq.ZMQError):  # not required: the network address works too
                socket.bind(plane.local_endpoint(port))
        if guarded:
            self._guarded.add((plane, port))
        return socket, port

    def connect(self, plane: Plane, host: str, port: int, identity: bytes, key: bytes = b"") -> Socket:
        """Return a DEALER that connects to the owner of `key` in the background and keeps trying.

        With an empty `key` the connection is not encrypted.

        Raises:
            UsageError: if `key` is empty and the connection would leave the machine.
        """
        socket = self._dealer(plane, host, port, identity, key)
        _connect(socket, plane, host, port)
        return socket

    def connect_watched(
        self, plane: Plane, host: str, port: int, identity: bytes, key: bytes = b""
    ) -> tuple[Socket, Monitor]:
        """Return a DEALER as `connect` does, with a monitor created before it connects, so that it misses no event.

        Raises:
            UsageError: if `key` is empty and the connection would leave the machine, or too many files are open.
        """
        socket = self._dealer(plane, host, port, identity, key)
        try:
            monitor = Monitor(socket)
        except zmq.ZMQError as error:
            socket.close(0)
            raise UsageError(_crowded(error)) from None
        _connect(socket, plane, host, port)
        return socket, monitor

    def disconnect_refused(self) -> bool:
        """End the connections of admitted keys that are no longer trusted. Return True if there were any.

        Only connections to ports that need keys are ended, and only on Linux. Other peers of the same plane at the same
        address lose their connections too, and reconnect.
        """
        gone = self._zap.callers.dismiss(self._refused) if self._zap else set()
        if gone:
            end_connections(
                {(port, address) for plane, port in self._guarded for name, address in gone if name == plane.name}
            )
        return bool(gone)

    def close(self) -> None:
        """Close every socket that is still open, and the context."""
        for socket in self._sockets:
            socket.close(0)
        if self._zap:
            self._zap.close()
        self.context.destroy(linger=0)

    def _dealer(self, plane: Plane, host: str, port: int, identity: bytes, key: bytes) -> Socket:
        if len(key) != KEY_BYTES and (key or self.policy.guards(host)):
            raise UsageError(
                f"{host}:{port} is on another machine, whose key is not known to this one; run tpi pair on that "
                "machine, and then on this one"
            )
        socket = self.open(zmq.DEALER, plane, identity)
        if key:
            _encrypt(socket, plane, self.policy)
            socket.setsockopt(zmq.CURVE_SERVERKEY, key)
        return socket

    def _guard(self, socket: Socket, plane: Plane) -> None:
        """Require a trusted key of every peer that connects to `socket`.

        libzmq asks the ZAP handler about each connection. While there is no handler, libzmq refuses all connections.
        """
        try:
            _encrypt(socket, plane, self.policy)
        except UsageError:
            socket.close(0)
            raise
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, plane.name.encode())
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        if self._zap is None:
            self._zap = ZapHandler(self.context, lambda key, name: not self._refused(name, (key,)))

    def _refused(self, name: str, keys: Iterable[bytes]) -> bool:
        return self.policy.any_refused(keys, sums=name == COLLECTIVE.name)


def _encrypt(socket: Socket, plane: Plane, policy: KeyPolicy) -> None:
    socket.setsockopt(zmq.CURVE_PUBLICKEY, policy.identity.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, policy.identity.secret)
    socket.setsockopt(zmq.MAXMSGSIZE, plane.frame_bytes + _CURVE_BYTES)


def _connect(socket: Socket, plane: Plane, host: str, port: int) -> None:
    _allow_ipv6(socket, host)
    local = plane.local and host in _LOOPBACK and _listens_locally(plane.local_endpoint(port))
    try:
        socket.connect(plane.local_endpoint(port) if local else f"tcp://{host}:{port}")
    except zmq.ZMQError as error:
        socket.close(0)
        raise UsageError(f"{host}:{port} is not an address: {os.strerror(error.errno or 0)}; give HOST:PORT") from None


def _listens_locally(endpoint: str) -> bool:
    """Return True if a process of this machine listens at `endpoint`.

    A loopback address may be that of a forwarded port, whose listener is on another machine.
    """
    try:
        return _UNIX_SOCKETS.read_text().find(f" {endpoint.removeprefix('ipc://')}\n") >= 0
    except OSError:
        return False


def _allow_ipv6(socket: Socket, host: str) -> None:
    socket.setsockopt(zmq.IPV6, int(":" in host))


def _crowded(error: zmq.ZMQError) -> str:
    return (
        f"no further connection can be opened: {os.strerror(error.errno or 0)}; raise the limit of open files "
        "(ulimit -n 4096)"
    )


def _bind_problem(number: int | None, plane: Plane, host: str, port: int) -> str:
    if number == errno.EADDRINUSE:
        return f"port {port} on {host} (the {plane.name} plane) is in use; give another one with --listen {host}:PORT"
    if number in (errno.EACCES, errno.EPERM):
        return f"port {port} on {host} needs privileges; give one above 1023 with --listen"
    return f"cannot listen on {host}:{port}: {os.strerror(number or 0)}; give an address of this machine with --listen"


def split_address(address: str, lowest_port: int = 1) -> tuple[str, int]:
    """Return host and port of `HOST:PORT` or `[IPV6]:PORT`.

    Raises:
        UsageError: if it is neither, or the port is below `lowest_port`.
    """
    host, separator, digits = address.rpartition(":")
    known = separator and digits.isdecimal() and lowest_port <= int(digits) <= 65535
    if not known or not host or (":" in host and not (host.startswith("[") and host.endswith("]"))):
        raise UsageError(f"{address!r} is not an address; write HOST:PORT, for example 192.168.1.7:9990")
    return host, int(digits)
