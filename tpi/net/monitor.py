"""What libzmq tells of a socket: its next message, whose it is, and connections made, lost and refused.

And how TCP connections are ended that libzmq holds: it has no way to send one peer away, the system has.
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

from tpi.keys.callers import caller
from tpi.system.interrupts import deferred
from tpi.system.packets import drop_packets

Socket = zmq.Socket[bytes]

_DESCRIPTORS = Path("/proc/self/fd")
_INTERNET = (system.AF_INET, system.AF_INET6)
_LOCAL_NAME = re.compile(rb"\0tpi-[a-z]+-(\d+)")  # tpi.net.sockets.Plane.local_endpoint


def receive_whole(socket: Socket) -> list[bytes] | None:
    """The frames of the next message, if there is one now; an interrupt waits for the last of them."""
    if not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
        return None
    with deferred():
        return socket.recv_multipart(zmq.NOBLOCK)


def receive_keyed(socket: Socket) -> tuple[list[bytes], bytes, int] | None:
    """Return the frames of the next message, its sender's key and its connection's descriptor; None if there is none.

    The key is empty where the socket needs none. The descriptor is -1 where libzmq does not know it.
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
    """Return the descriptor of the connection that `frame` came by; -1 if it was reset before libzmq looked at it."""
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
    """Tells when a connecting socket gets and loses its connection. Made before it connects; used by its thread."""

    def __init__(self, socket: Socket) -> None:
        self.refused = False  # the other end knows the key of this one, and does not let it in
        self.mismatch = False  # one of the ends wants keys, and the other has none
        self.address = ""  # of the other end, once it was connected to
        self._socket = socket
        self.events: Socket = socket.get_monitor_socket(_WATCHED)

    def changes(self) -> Iterator[bool]:
        """True for every connection made since the last call, False for every one lost or never made, in order."""
        while (frames := receive_whole(self.events)) is not None:
            # zmq_socket_monitor(3): 16 bits of event, 32 of value; zmq.utils.monitor would do it, but imports asyncio
            event = int.from_bytes(frames[0][:2], sys.byteorder)
            if event == zmq.EVENT_CONNECTED:
                self.address = other_end(int.from_bytes(frames[0][2:6], sys.byteorder)) or self.address
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self.refused = True
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self.mismatch = True
            else:
                yield event == zmq.EVENT_HANDSHAKE_SUCCEEDED

    def close(self) -> None:
        """Stop watching; before the socket is closed."""
        self._socket.disable_monitor()
        self.events.close()


class Arrivals:
    """Counts the connections that others have made to a bound socket, proven keys or not. Used by its thread."""

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self._open: set[int] = set()  # by descriptor
        self.events: Socket = socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)

    def count(self) -> int:
        """How many there are now."""
        while (frames := receive_whole(self.events)) is not None:
            event = int.from_bytes(frames[0][:2], sys.byteorder)
            descriptor = int.from_bytes(frames[0][2:6], sys.byteorder)
            (self._open.add if event == zmq.EVENT_ACCEPTED else self._open.discard)(descriptor)
        return len(self._open)

    def close(self) -> None:
        """Stop counting; before the socket is closed."""
        self._socket.disable_monitor()
        self.events.close()


def end_connection(descriptor: int) -> None:
    """Shut a connection down. libzmq notices, and closes it. Does nothing if the descriptor is none any more."""
    with suppress(OSError), _borrowed(descriptor) as one:
        if one.family in _INTERNET and not _listens(one):
            one.shutdown(system.SHUT_RDWR)


def sever(places: Collection[tuple[int, str]]) -> None:
    """End the connections to ports of this process that come from addresses of others, as `tpi.keys.callers` has them.

    Does nothing where there is no /proc.
    """
    for number in _open_sockets():
        with suppress(OSError), _borrowed(number) as one:
            if not _listens(one) and _came_from(one) in places:
                one.shutdown(system.SHUT_RDWR)


def deafen(address: str, ports: Collection[int]) -> None:
    """Hear no more from `ports` at `address`, which this process has called: their ends are told that it hung up.

    libzmq would call again at once where a connection ends: so it is left with one through which nothing comes.
    """
    for number in _open_sockets():
        with suppress(OSError), _borrowed(number) as one:
            if one.family in _INTERNET and one.getpeername()[1] in ports and caller(one.getpeername()[0]) == address:
                drop_packets(one)
                one.shutdown(system.SHUT_WR)


def other_end(descriptor: int) -> str:
    """The address at the other end of a connection; empty if it is none any more."""
    with suppress(OSError), _borrowed(descriptor) as one:
        return caller(one.getpeername()[0]) if one.family in _INTERNET else ""
    return ""


def _came_from(one: system.socket) -> tuple[int, str]:
    """The port here that a connection came to, and the address that it came from."""
    if one.family in _INTERNET:
        return int(one.getsockname()[1]), caller(one.getpeername()[0])
    name = one.getsockname()
    local = _LOCAL_NAME.fullmatch(name) if isinstance(name, bytes) else None
    return (int(local[1]), "") if local else (0, "")


def _open_sockets() -> Iterator[int]:
    if not _DESCRIPTORS.is_dir():
        return
    for number in [int(path.name) for path in _DESCRIPTORS.iterdir()]:
        with suppress(OSError):  # the one that the directory was read with
            if S_ISSOCK(os.fstat(number).st_mode):
                yield number


def _listens(one: system.socket) -> bool:
    return bool(one.getsockopt(system.SOL_SOCKET, system.SO_ACCEPTCONN))


@contextmanager
def _borrowed(number: int) -> Iterator[system.socket]:
    """libzmq's socket, which stays open."""
    one = system.socket(fileno=os.dup(number))
    try:
        yield one
    finally:
        one.close()
