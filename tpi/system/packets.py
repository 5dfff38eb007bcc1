"""Socket filters that have the kernel drop incoming packets (Linux; on other systems nothing happens)."""

import socket
import struct
import sys
from contextlib import suppress

_ATTACH_FILTER, _DETACH_FILTER = 26, 27  # SO_ATTACH_FILTER of socket(7)
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF: return 0


def drop_packets(one: socket.socket) -> None:
    """Drop all packets that arrive for a socket.

    On a listener this stops new connections. Open connections are not affected, because each has its own filter.
    """
    import ctypes

    if sys.platform == "linux":
        code = ctypes.create_string_buffer(_DROP_ALL)
        with suppress(OSError):
            one.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HxxxxxxP", 1, ctypes.addressof(code)))


def accept_packets(one: socket.socket) -> None:
    """Accept packets again after `drop_packets`."""
    if sys.platform == "linux":
        with suppress(OSError):
            one.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
