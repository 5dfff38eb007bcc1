"""The sender of an HTTP request: with whom it shares places, and what is kept from other senders."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from ipaddress import IPv6Address, ip_address, ip_network

_BYTES = 16
_SITE_BITS = 64  # of an IPv6 address: a home or a host has all addresses below


@dataclass(frozen=True)
class Sender:
    """One client of the server.

    Attributes:
        name: of those who share places and pages as one: a key where there are several, else an address (IPv6: its
            /64).
        owner: stands for the key and the whole address; stored responses are found by their owner alone.
        salt: cached prefixes are found by requests of the same salt alone; empty where all share them.
    """

    name: str
    owner: bytes
    salt: bytes

    def salted(self, more: Sequence[str | None]) -> bytes:
        """Return the salt of a request that names `more` of its own."""
        return self.salt if all(one is None for one in more) else _digest([self.salt.hex(), *more])


def sender_of(address: str, key: str, keys: Sequence[str], share: bool) -> Sender:
    """Return the sender at `address` that gave `key`, on a server of `keys`; with `share` prefixes are not salted.

    One key for all, or none, says nothing of who asks: then the address does.
    """
    if len(keys) > 1:
        name, owner = f"key {keys.index(key)}" if key in keys else "", _digest([key])
    else:
        name, owner = network_of(address), _digest([key, address])
    return Sender(name, owner, b"" if share else owner)


def network_of(address: str) -> str:
    """Return what stands for all addresses of one client: an IPv4 address, or the /64 of an IPv6 address."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if not isinstance(found, IPv6Address):
        return str(found)
    return str(found.ipv4_mapped or ip_network((found, _SITE_BITS), strict=False))


def _digest(parts: Sequence[str | None]) -> bytes:
    return blake2b(json.dumps(parts).encode(), digest_size=_BYTES).digest()
