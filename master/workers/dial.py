"""Connecting to a worker: an address locates it, and its key identifies it.

A connection is opened for every key that may be valid at the address, and the first authenticated one is used. On
this machine no key is needed, but a worker that also listens on the network asks for a key, which is then this
machine's own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tpi.errors import UsageError
from tpi.keys.text import short_key
from tpi.net.monitor import Monitor, Socket
from tpi.net.sockets import CONTROL, Net, split_address

_MOST_LINES = 32  # connections to one address at once


@dataclass
class Line:
    """A connection in progress to the owner of `key`; an empty key accepts any worker on this machine."""

    socket: Socket
    monitor: Monitor
    key: bytes
    failed: bool = False

    def close(self) -> None:
        """Close the connection to the worker."""
        self.monitor.close()
        self.socket.close(0)


class Dial:
    """The connections to one address. Only one thread at a time may use it."""

    def __init__(self, net: Net, address: str, identity: bytes, key: bytes = b"") -> None:
        """Start connecting to `address` (`HOST:PORT`); with a `key`, only to its owner.

        `identity` is the routing id of this side, by which the worker knows the connection (`master_identity`).

        Raises:
            UsageError: if `address` is not an address, the key is not trusted, or this machine's own key cannot be
                used.
        """
        self._net, self._address, self._identity, self._wanted = net, address, identity, key
        self._host, self._port = split_address(address)
        self._guarded = net.policy.guards(self._host)
        self.lines: list[Line] = []
        self._untried: Sequence[bytes] = ()
        self._call(self._trusted() if self._guarded else (b"",))

    @property
    def sockets(self) -> Iterator[Socket]:
        """Sockets to poll while waiting."""
        return (line.monitor.events for line in self.lines)

    def answered(self) -> Line | None:
        """Return the authenticated connection, or None if there is none yet.

        The connection then belongs to the caller, and the others are closed.
        """
        for line in self.lines:
            for connected in line.monitor.changes():
                line.failed = True
                if connected:
                    self.lines.remove(line)
                    self.close()
                    return line
        if not self._guarded and len(self.lines) == 1 and self.lines[0].monitor.mismatch:
            self._call(self._trusted())
        if self._untried and self._failed():
            self.close()
            self._call(self._untried)
        return None

    def obstacle(self) -> str:
        """Return a sentence with the reason why no key is accepted; empty while a key may still be accepted."""
        mine = short_key(self._net.policy.identity.public) if self._guarded else ""
        if shut := next((line for line in self.lines if line.monitor.refused), None):
            who = self._net.policy.name_of(shut.key) or "the worker"
            return (
                f"{who} at {self._address} does not accept this machine's key ({mine}): it was revoked there, or never "
                "trusted; to pair the two again run tpi pair there, then tpi pair HOST CODE on this machine"
            )
        if not self._guarded or self._untried or not self._failed():
            return ""
        return (
            f"the machine that answers at {self._address} has none of the keys that this machine ({mine}) trusts; "
            "if that is your worker, pair the two: run tpi pair there, then on this machine"
        )

    def close(self) -> None:
        """Close the connections that are left."""
        for line in self.lines:
            line.close()
        self.lines = []

    def _trusted(self) -> tuple[bytes, ...]:
        found = self._net.policy.trusted(self._host)
        if self._wanted and self._wanted not in found:
            raise UsageError(
                f"the key of the worker sought at {self._address} is not trusted any more; pair the two machines again"
            )
        return (self._wanted,) if self._wanted else found

    def _failed(self) -> bool:
        """Return True if the other side has rejected all keys that are being tried."""
        return bool(self.lines) and all(line.failed and not line.monitor.refused for line in self.lines)

    def _call(self, keys: Sequence[bytes]) -> None:
        """Open connections for as many of `keys` as are allowed at once; try the others after these have failed."""
        self._untried = keys[_MOST_LINES:]
        try:
            for key in keys[:_MOST_LINES]:
                self.lines.append(self._line(key))
        except UsageError:
            self.close()
            raise

    def _line(self, key: bytes) -> Line:
        socket, monitor = self._net.connect_watched(CONTROL, self._host, self._port, self._identity, key)
        return Line(socket, monitor, key)
