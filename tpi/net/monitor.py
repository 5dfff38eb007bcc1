"""Information that libzmq has about a socket: its messages, their senders, connections made, lost and refused.

Also functions that end TCP connections held by libzmq, which cannot disconnect a single peer itself.
"""

import os
import re
import socket as system
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISSOCK

import zmq

from tpi.keys.knownpeers import caller
from tpi.system.interrupts import deferred
from tpi.system.packets import drop_packets

Socket = zmq.Socket[bytes]

_DESCRIPTORS = Path("/proc/self/fd")
_INTERNET = (system.AF_INET, system.AF_INET6)
_LOCAL_NAME = re.compile(rb"\0tpi-[a-z]+-(\d+)")  # tpi.net.sockets.Plane.local_endpoint


def receive_whole(socket: Socket) -> list[bytes] | None:
    """Return the frames of the next message, or None if there is none now.

    An interrupt is deferred until the last frame is read.
    """
    if not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
        return None
    with deferred():
        return socket.recv_multipart(zmq.NOBLOCK)


def receive_keyed(socket: Socket) -> tuple[list[bytes], bytes, int] | None:
    """Return the frames of the next message, its sender's key and its connection's descriptor; None if there is none.

    The key is empty if the socket needs none. The descriptor is -1 if libzmq does not know it.
    """
    if not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
        return None
    with deferred():
        first = socket.recv(zmq.NOBLOCK, copy=False)
        keyed = socket.getsockopt(zmq.CURVE_SERVER)
        key, descriptor = bytes.fromhex(str(first.get("User-Id"))) if keyed else b"", _descriptor(first)
        frames = [first.bytes]
        del first
        while socket.rcvmore:
            frames.append(socket.recv(zmq.NOBLOCK))
        return frames, key, descriptor


def _descriptor(frame: zmq.Frame) -> int:
    """Return the descriptor of the connection that delivered `frame`.

    Return -1 if the connection was reset before libzmq asked for its descriptor.
    """
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


_WATCHED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


class Monitor:
    """Connection events of a connecting socket. Create it before the socket connects; use it in the socket's thread."""

    def __init__(self, socket: Socket) -> None:
        self.refused = False  # the other end refused this machine's key
        self.mismatch = False  # one end requires keys, and the other has none
        self.address = ""  # IP address of the other end, once connected
        self._socket = socket
        self.events: Socket = socket.get_monitor_socket(_WATCHED)

    def changes(self) -> Iterator[bool]:
        """Yield True for each connection made since the last call and False for each one lost or not made, in order."""
        while (frames := receive_whole(self.events)) is not None:
            # zmq_socket_monitor(3): 16 bits of event, 32 of value; zmq.utils.monitor would do it, but imports asyncio
            event = int.from_bytes(frames[0][:2], sys.byteorder)
            if event == zmq.EVENT_CONNECTED:
                self.address = peer_address(int.from_bytes(frames[0][2:6], sys.byteorder)) or self.address
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self.refused = True
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self.mismatch = True
            else:
                yield event == zmq.EVENT_HANDSHAKE_SUCCEEDED

    def close(self) -> None:
        """Stop monitoring. Call it before the socket is closed."""
        self._socket.disable_monitor()
        self.events.close()


class Arrivals:
    """Counter of the connections that others have made to a bound socket, with or without a proven key.

    Use it in the socket's thread.
    """

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self._open: set[int] = set()  # descriptors of the open connections
        self.events: Socket = socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)

    def count(self) -> int:
        """Return the number of connections that are open now."""
        while (frames := receive_whole(self.events)) is not None:
            event = int.from_bytes(frames[0][:2], sys.byteorder)
            descriptor = int.from_bytes(frames[0][2:6], sys.byteorder)
            (self._open.add if event == zmq.EVENT_ACCEPTED else self._open.discard)(descriptor)
        return len(self._open)

    def close(self) -> None:
        """Stop counting. Call it before the socket is closed."""
        self._socket.disable_monitor()
        self.events.close()


def end_connection(descriptor: int) -> None:
    """Shut a connection down; libzmq notices it and closes it. Do nothing if `descriptor` is no longer a connection."""
    with suppress(OSError), _borrowed(descriptor) as one:
        if one.family in _INTERNET and not _listens(one):
            one.shutdown(system.SHUT_RDWR)


def end_connections(places: Collection[tuple[int, str]]) -> None:
    """End the connections in `places`, pairs of a port of this process and a remote address.

    Addresses are written as `tpi.keys.knownpeers.caller` returns them. Do nothing if there is no /proc.
    """
    for number in _open_sockets():
        with suppress(OSError), _borrowed(number) as one:
            if not _listens(one) and _came_from(one) in places:
                one.shutdown(system.SHUT_RDWR)


def drop_incoming(address: str, ports: Collection[int]) -> None:
    """Discard further packets from `ports` at `address`, and shut down the sending side of these connections.

    Only connections that this process made are affected. If they were closed, libzmq would reconnect at once; so they
    stay open, but nothing arrives through them.
    """
    for number in _open_sockets():
        with suppress(OSError), _borrowed(number) as one:
            if one.family in _INTERNET and one.getpeername()[1] in ports and caller(one.getpeername()[0]) == address:
                drop_packets(one)
                one.shutdown(system.SHUT_WR)


def peer_address(descriptor: int) -> str:
    """Return the address at the other end of a connection; empty if it is no longer a connection."""
    with suppress(OSError), _borrowed(descriptor) as one:
        return caller(one.getpeername()[0]) if one.family in _INTERNET else ""
    return ""


def _came_from(one: system.socket) -> tuple[int, str]:
    """Return the local port that the connection `one` arrived at, and the address that it came from."""
    if one.family in _INTERNET:
        return int(one.getsockname()[1]), caller(one.getpeername()[0])
    name = one.getsockname()
    local = _LOCAL_NAME.fullmatch(name) if isinstance(name, bytes) else None
    return (int(local[1]), "") if local else (0, "")


def _open_sockets() -> Iterator[int]:
    if not _DESCRIPTORS.is_dir():
        return
    for number in [int(path.name) for path in _DESCRIPTORS.iterdir()]:
        with suppress(OSError):  # the descriptor that was used to read the directory is closed by now
            if S_ISSOCK(os.fstat(number).st_mode):
                yield number


def _listens(one: system.socket) -> bool:
    return bool(one.getsockopt(system.SOL_SOCKET, system.SO_ACCEPTCONN))


@contextmanager
def _borrowed(number: int) -> Iterator[system.socket]:
    """Open a duplicate of libzmq's socket `number` for the block. Closing the duplicate leaves libzmq's socket open."""
    one = system.socket(fileno=os.dup(number))
    try:
        yield one
    finally:
        one.close()
