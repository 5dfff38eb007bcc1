"""Whose connections come from where: libzmq tells neither which connection is whose, nor sends one peer away."""

import ipaddress
from collections.abc import Callable, Iterable
from threading import Lock

Place = tuple[str, str]
"""A plane's name, and the address that somebody called it from."""

Refused = Callable[[str, Iterable[bytes]], bool]
"""Whether one of some keys may not be on the plane of a name any more."""


class Callers:
    """Keys that were let in, by the place that they came from. May be used by several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._keys: dict[Place, set[bytes]] = {}

    def come(self, place: Place, key: bytes) -> bool:
        """Somebody is at the door; whether its key is new at that place. To be called before the key is looked up."""
        with self._lock:
            there = self._keys.setdefault(place, set())
            new = key not in there
            there.add(key)
        return new

    def leave(self, place: Place, key: bytes) -> None:
        """It was not let in."""
        with self._lock:
            self._keys.get(place, set()).discard(key)

    def dismiss(self, refused: Refused) -> set[Place]:
        """The places that somebody `refused` came from; they are forgotten, and their connections have to end."""
        with self._lock:
            gone = {place for place, keys in self._keys.items() if refused(place[0], keys)}
            for place in gone:
                del self._keys[place]
        return gone


def caller(address: str) -> str:
    """One name for an address, however the system writes it; empty for all processes of this machine (ipc)."""
    bare = address.partition("%")[0].removeprefix("::ffff:")
    try:
        return str(ipaddress.ip_address(bare))
    except ValueError:
        return ""
