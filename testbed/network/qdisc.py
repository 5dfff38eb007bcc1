"""Tests of which queueing disciplines the kernel has."""

import errno
import os
import socket
import struct

from testbed.network.namespaces import inside, new_namespace

_NEW_QDISC, _REQUEST_AND_ACK = 36, 0x1 | 0x4 | 0x400
_KIND, _ROOT, _LOOPBACK = 1, 0xFFFFFFFF, 1


def has_qdisc(kind: str) -> bool:
    """Return True if the kernel has, or can load, the queueing discipline `kind`. The test runs in a new namespace."""
    name = kind.encode() + b"\0"
    attribute = struct.pack("HH", 4 + len(name), _KIND) + name.ljust(-(-len(name) // 4) * 4, b"\0")
    body = struct.pack("BBHiIII", socket.AF_UNSPEC, 0, 0, _LOOPBACK, 0, _ROOT, 0) + attribute
    message = struct.pack("IHHII", 16 + len(body), _NEW_QDISC, _REQUEST_AND_ACK, 1, 0) + body
    namespace = new_namespace()
    try:
        with inside(namespace), socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as netlink:
            netlink.send(message)
            (code,) = struct.unpack_from("i", netlink.recv(4096), 16)
    finally:
        os.close(namespace)
    return int(-code) != errno.ENOENT  # for a known kind the error is about missing options


def has_netem() -> bool:
    """Return True if the kernel can delay and lose packets."""
    return has_qdisc("netem")
