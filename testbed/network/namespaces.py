"""Network namespaces and TUN devices by system calls: without iproute2, and without leaving anything on disk.

The namespaces have no names. A namespace is an open file descriptor, and disappears with the last descriptor and
process in it. Therefore a testbed whose holder is killed leaves neither a namespace nor a TUN device behind.
"""

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tpi.errors import TestbedError

CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
PR_SET_TIMERSLACK = 29
CONGESTION = ("cubic", "reno")
"""TCP congestion control of the devices: the first of these that the host allows.

Most devices use it, and the host's own choice may differ. BBR sends no faster than its mean rate of the past, and a
link of a cluster is idle for most of a token.
"""
VNET_HEADER = 10  # bytes of struct virtio_net_hdr in front of every packet that is read or written
TUN_NAME = "tpi0"  # the same in every namespace, where it is the only device besides lo

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02
_SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFMTU, _SIOCSIFTXQLEN = 0x8916, 0x891C, 0x8922, 0x8943
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1


def _libc(name: str, *arguments: int) -> None:
    """Call a C function that returns 0. Raise OSError if it returns anything else."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def require_root() -> None:
    """Raise TestbedError unless this process may create namespaces."""
    if not hasattr(os, "geteuid") or not Path("/proc/self/ns/net").exists():
        raise TestbedError("the testbed needs network namespaces and cgroups: use a machine with Linux")
    if os.geteuid() != 0:
        raise TestbedError("the testbed needs root to create network namespaces and cgroups: run it with sudo")


def die_with_parent(signal_number: int) -> None:
    """Have the kernel send `signal_number` to this process when the thread that started it ends."""
    _libc("prctl", PR_SET_PDEATHSIG, signal_number, 0, 0, 0)


def sharpen_timers() -> None:
    """Reduce the error of this process's sleeps from the usual 50 microseconds to 1."""
    _libc("prctl", PR_SET_TIMERSLACK, 1, 0, 0, 0)


def current_namespace() -> int:
    """Return a descriptor of the calling thread's network namespace. The caller closes it."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def enter_namespace(descriptor: int) -> None:
    """Move the calling thread into the namespace behind `descriptor`."""
    _libc("setns", descriptor, CLONE_NEWNET)


@contextmanager
def inside(descriptor: int) -> Iterator[None]:
    """Run the `with` block in another namespace. Sockets opened in the block stay in that namespace.

    Only the calling thread moves.
    """
    before = current_namespace()
    try:
        enter_namespace(descriptor)
        yield
    finally:
        enter_namespace(before)
        os.close(before)


def new_namespace() -> int:
    """Create an empty namespace with its loopback up, and return its descriptor.

    The calling thread stays in its own namespace.
    """
    before = current_namespace()
    try:
        _libc("unshare", CLONE_NEWNET)
        try:
            _disable_ipv6()
            congestion_control()
            set_up("lo")
            return current_namespace()
        finally:
            enter_namespace(before)
    finally:
        os.close(before)


def congestion_control() -> str:
    """Set the congestion control of the calling thread's namespace from `CONGESTION`.

    Return the name of the algorithm in use.
    """
    setting = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    for name in CONGESTION:
        with suppress(OSError):  # not available, or not allowed outside the host's own namespace
            setting.write_text(name)
            break
    return setting.read_text().strip()


def open_tun(address: str, prefix: int, mtu: int, offload: bool) -> int:
    """Create a TUN device in the calling thread's namespace and bring it up.

    Args:
        address: IPv4 address of this end; the whole `prefix` is reached through the device.
        prefix: length of the network prefix in bits.
        mtu: the maximum size of an IP packet in bytes.
        offload: let TCP pass up to 64 KiB at once, which needs a tenth of the system calls.

    Returns:
        A non-blocking descriptor. Each read and write is one packet behind a virtio header of `VNET_HEADER` bytes.
    """
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", TUN_NAME.encode(), flags))
        fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _TUN_F_CSUM | (_TUN_F_TSO4 if offload else 0))
        mask = socket.inet_ntoa(struct.pack(">I", 0xFFFFFFFF << (32 - prefix) & 0xFFFFFFFF))
        _interface_address(TUN_NAME, _SIOCSIFADDR, address)
        _interface_address(TUN_NAME, _SIOCSIFNETMASK, mask)
        _interface_number(TUN_NAME, _SIOCSIFMTU, mtu)
        _interface_number(TUN_NAME, _SIOCSIFTXQLEN, 10000)
        set_up(TUN_NAME)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def set_up(name: str) -> None:
    """Bring the interface `name` of the calling thread's namespace up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        request = fcntl.ioctl(handle, _SIOCGIFFLAGS, struct.pack("16sH22x", name.encode(), 0))
        (flags,) = struct.unpack_from("H", request, 16)
        fcntl.ioctl(handle, _SIOCSIFFLAGS, struct.pack("16sH22x", name.encode(), flags | _IFF_UP))


def _interface_address(name: str, request: int, address: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        ipv4 = socket.inet_aton(address)
        fcntl.ioctl(handle, request, struct.pack("16sHH4s16x", name.encode(), socket.AF_INET, 0, ipv4))


def _interface_number(name: str, request: int, number: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        fcntl.ioctl(handle, request, struct.pack("16si20x", name.encode(), number))


def _disable_ipv6() -> None:
    """Disable IPv6, so that unanswered neighbour discovery does not use the emulated links."""
    for which in ("all", "default"):
        switch = Path("/proc/sys/net/ipv6/conf", which, "disable_ipv6")
        if switch.exists():
            switch.write_text("1")
