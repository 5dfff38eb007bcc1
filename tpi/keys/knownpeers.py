"""The addresses from which the owners of admitted keys connected.

libzmq does not tell which connection belongs to which key, and cannot close the connection of one peer. So connections
are closed by their remote address.
"""

import ipaddress
from collections.abc import Callable, Iterable
from threading import Lock

Place = tuple[str, str]
"""A plane's name, and the remote address of a connection to it."""

Refused = Callable[[str, Iterable[bytes]], bool]
"""Returns True if at least one of the keys is no longer admitted to the plane with the given name."""


class KnownPeers:
    """Admitted keys, by the remote address of their connections. Safe for use by several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._keys: dict[Place, set[bytes]] = {}

    def come(self, place: Place, key: bytes) -> bool:
        """Record a connection with `key` from `place`; return True if the key is new there.

        Call this before the key is looked up.
        """
        with self._lock:
            there = self._keys.setdefault(place, set())
            new = key not in there
            there.add(key)
        return new

    def leave(self, place: Place, key: bytes) -> None:
        """Remove the record of `key` at `place`, because the key was not admitted."""
        with self._lock:
            self._keys.get(place, set()).discard(key)

    def dismiss(self, refused: Refused) -> set[Place]:
        """Remove and return the places (plane and address) with keys for which `refused(plane, keys)` is True.

        The caller has to end the connections from these places.
        """
        with self._lock:
            gone = {place for place, keys in self._keys.items() if refused(place[0], keys)}
            for place in gone:
                del self._keys[place]
        return gone


def caller(address: str) -> str:
    """Return an IP address in one normal form, whatever form the system gives; empty for local sockets (ipc)."""
    bare = address.partition("%")[0].removeprefix("::ffff:")
    try:
        return str(ipaddress.ip_address(bare))
    except ValueError:
        return ""
