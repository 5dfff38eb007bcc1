"""The server's listening sockets, one for each address of `--host`, and the URLs to reach them."""

import errno
import resource
import socket
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from types import TracebackType

import psutil

from tpi.errors import UsageError

_DEAD_MS = 60_000  # a connection is closed if its client acknowledges no data for this time
_BACKLOG = 1024
_ANY_V4, _ANY_V6 = "0.0.0.0", "::"
_TRIES = 16  # attempts to get the same port for several sockets, for port 0
_NOT_OURS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class Listening:
    """The sockets of one server, all with the same port."""

    def __init__(self, host: str, sockets: Sequence[socket.socket]) -> None:
        self.host, self.sockets = host, tuple(sockets)

    def __enter__(self) -> "Listening":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for one in self.sockets:
            one.close()

    @property
    def port(self) -> int:
        """The TCP port."""
        return int(self.sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        """The URL nearest to this machine, the first of `urls`."""
        return self.urls()[0]

    def urls(self) -> list[str]:
        """Return a URL for each address at which the server answers, the nearest to this machine first.

        If the host stands for all addresses, return loopback and the addresses of the interfaces that are up. IPv6
        link-local addresses are left out, because browsers cannot open them. A name stays a name.
        """
        own = [_address(one.getsockname()[0]) for one in self.sockets]
        if any(one.is_unspecified for one in own):
            versions = {one.version for one in own}
            return [_url(str(one), self.port) for one in _machine_addresses() if one.version in versions]
        with suppress(ValueError):
            return [_url(str(_address(self.host)), self.port)]
        return [_url(self.host, self.port)]


def listen(host: str, port: int) -> Listening:
    """Listen at every address of `host`; port 0 takes a free one.

    `0.0.0.0` is all IPv4 addresses of this machine, `::` all IPv4 and IPv6 addresses. An IPv6 address may be in
    brackets, as in a URL.

    Raises:
        UsageError: if the server cannot listen at `host` and `port`.
    """
    _allow_files()
    try:
        return Listening(_bare(host), _sockets(_bare(host), port))
    except UnicodeError:  # raised for a label that is empty or too long
        raise UsageError(f"--host {host!r} is not a name or an address; give one of this machine") from None
    except OSError as error:
        said = (error.strerror or str(error)).partition(" (while")[0]  # Python adds the address
        raise UsageError(f"cannot listen at {host}:{port}: {said}; give another --host or --port") from error


def is_own(host: str) -> bool:
    """Return True if only this machine can connect to `host`."""
    with suppress(ValueError):
        return ip_address(_bare(host)).is_loopback
    return host == "localhost"


def _bare(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _sockets(host: str, port: int, tries: int = _TRIES) -> list[socket.socket]:
    """Bind one socket for each address.

    If the port that was chosen for port 0 is in use at another address, try again.
    """
    try:
        return _bound(_addresses(host), port)
    except OSError as error:
        if port or error.errno != errno.EADDRINUSE or tries == 1:
            raise
    return _sockets(host, port, tries - 1)


def _bound(addresses: Sequence[tuple[int, str, int]], port: int) -> list[socket.socket]:
    """Bind a socket to each address. For port 0, all sockets get the port that the system gave the first one.

    Addresses that this machine lacks are skipped if at least one other address works.
    """
    found: list[socket.socket] = []
    refused: OSError | None = None
    with ExitStack() as stack:
        for family, address, scope in addresses:
            at: tuple[str | int, ...] = (address, port, 0, scope) if family == socket.AF_INET6 else (address, port)
            try:
                one = socket.create_server(
                    at, family=family, backlog=_BACKLOG
                )  # an IPv6 socket takes no IPv4 connections
            except OSError as error:
                if error.errno not in _NOT_OURS:
                    raise
                refused = error
                continue
            found.append(stack.enter_context(closing(one)))
            port = one.getsockname()[1]
            _tune(one)
        stack.pop_all()
    if not found:
        raise refused or OSError(errno.EADDRNOTAVAIL, "it has no address")
    return found


def _addresses(host: str) -> list[tuple[int, str, int]]:
    """Return the family, address and IPv6 scope of each address of `host`, in the order of the resolver."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    ours = [(int(family), str(at[0]), int(at[3]) if len(at) > 3 else 0) for family, _, _, _, at in found]
    if any(address == _ANY_V6 for _, address, _ in ours):
        ours.append((int(socket.AF_INET), _ANY_V4, 0))
    return list(dict.fromkeys(ours))


def _tune(listening: socket.socket) -> None:
    """Set options that accepted sockets inherit. asyncio sets TCP_NODELAY only on sockets with an explicit protocol."""
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_MS)


def _machine_addresses() -> list[IPv4Address | IPv6Address]:
    """Return the addresses of this machine: loopback first, then IPv4, then IPv6, without link-local IPv6 addresses."""
    up = {name for name, figures in psutil.net_if_stats().items() if figures.isup}
    found = [
        _address(one.address)
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family in (socket.AF_INET, socket.AF_INET6) and name in up
    ]
    reachable = [one for one in dict.fromkeys(found) if not (one.version == 6 and one.is_link_local)]
    return sorted(reachable, key=lambda one: (not one.is_loopback, one.version))


def _address(text: str) -> IPv4Address | IPv6Address:
    """Parse an IP address without its scope (`%eth0`), which has a meaning only on this machine."""
    return ip_address(text.partition("%")[0])


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _allow_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 65536)), hard))
