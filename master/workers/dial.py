"""Finding out who answers at an address: the address says where, the key says who.

A line is opened for every key that may be met there, and the first that proves to be right is kept. On this machine no
key is needed; a worker that listens beyond it asks for one all the same, and then has this machine's own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tpi.errors import UsageError
from tpi.keys.text import short_key
from tpi.net.monitor import Monitor, Socket
from tpi.net.sockets import CONTROL, Net, split_address

_MOST_LINES = 32  # to one address at once


@dataclass
class Line:
    """A connection under way to whoever has `key`; empty: to anybody on this machine."""

    socket: Socket
    monitor: Monitor
    key: bytes
    failed: bool = False

    def close(self) -> None:
        """Hang up."""
        self.monitor.close()
        self.socket.close(0)


class Dial:
    """The lines to one address. Used by one thread at a time."""

    def __init__(self, net: Net, address: str, identity: bytes, key: bytes = b"") -> None:
        """With a `key` its owner is called, and nobody else.

        Raises:
            UsageError: if it is no address, the key is not trusted, or this machine's own key is unusable.
        """
        self._net, self._address, self._identity, self._wanted = net, address, identity, key
        self._host, self._port = split_address(address)
        self._guarded = net.door.guards(self._host)
        self.lines: list[Line] = []
        self._untried: Sequence[bytes] = ()
        self._call(self._trusted() if self._guarded else (b"",))

    @property
    def sockets(self) -> Iterator[Socket]:
        """What to poll while waiting."""
        return (line.monitor.events for line in self.lines)

    def answered(self) -> Line | None:
        """The line at whose end the right key answered; it is the caller's from now on, and the others are closed."""
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
        """A sentence on why no key answers, or nothing while one still may."""
        mine = short_key(self._net.door.identity.public) if self._guarded else ""
        if shut := next((line for line in self.lines if line.monitor.refused), None):
            who = self._net.door.name_of(shut.key) or "the worker"
            return (
                f"{who} at {self._address} does not let this machine's key ({mine}) in: it was revoked there, or never "
                "trusted; to pair the two again run tpi pair there and then, as it says, tpi pair HOST CODE here"
            )
        if not self._guarded or self._untried or not self._failed():
            return ""
        return (
            f"whoever answers at {self._address} has none of the keys that this machine ({mine}) trusts; "
            "if that is your worker, pair the two: run tpi pair there, and then here"
        )

    def close(self) -> None:
        """Hang up all that are left."""
        for line in self.lines:
            line.close()
        self.lines = []

    def _trusted(self) -> tuple[bytes, ...]:
        found = self._net.door.trusted(self._host)
        if self._wanted and self._wanted not in found:
            raise UsageError(f"the key that {self._address} is called for is not trusted any more; pair the two again")
        return (self._wanted,) if self._wanted else found

    def _failed(self) -> bool:
        """Whether whoever answers has none of the keys that are tried now."""
        return bool(self.lines) and all(line.failed and not line.monitor.refused for line in self.lines)

    def _call(self, keys: Sequence[bytes]) -> None:
        """Open lines for as many of `keys` as may be at once; the others follow when these have failed."""
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
