"""Ending TCP connections that libzmq holds: it has no way to send one peer away, the system has."""

import os
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISSOCK

_DESCRIPTORS = Path("/proc/self/fd")
_INTERNET = (socket.AF_INET, socket.AF_INET6)


def end_connection(descriptor: int) -> None:
    """Shut a connection down. libzmq notices, and closes it. Does nothing if the descriptor is none any more."""
    with suppress(OSError), _borrowed(descriptor) as one:
        if one.family in _INTERNET and not _listens(one):
            one.shutdown(socket.SHUT_RDWR)


def sever(ports: Collection[int]) -> None:
    """End all connections that others have made to `ports` of this process. Does nothing where there is no /proc."""
    for number in _open_sockets():
        with suppress(OSError), _borrowed(number) as one:
            own = one.family in _INTERNET and one.getsockname()[1] in ports
            if own and not _listens(one):
                one.shutdown(socket.SHUT_RDWR)


def _open_sockets() -> Iterator[int]:
    if not _DESCRIPTORS.is_dir():
        return
    for number in [int(path.name) for path in _DESCRIPTORS.iterdir()]:
        with suppress(OSError):  # the one that the directory was read with
            if S_ISSOCK(os.fstat(number).st_mode):
                yield number


def _listens(one: socket.socket) -> bool:
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


@contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """libzmq's socket, which stays open."""
    one = socket.socket(fileno=os.dup(number))
    try:
        yield one
    finally:
        one.close()
