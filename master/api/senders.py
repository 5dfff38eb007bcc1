"""The sender of an HTTP request, which determines its share of the server and its cached data."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from ipaddress import IPv6Address, ip_address, ip_network

_BYTES = 16
_SITE_BITS = 64  # prefix length of an IPv6 network: one home or host has all addresses in it


@dataclass(frozen=True)
class Sender:
    """One client of the server.

    Attributes:
        name: the unit of fair sharing: the API key if the server has several, else the address (IPv6: its /64 network).
        owner: a digest of the key and the whole address; only the owner finds its stored responses.
        salt: requests find only cached prefixes with the same salt; empty if all clients share them.
    """

    name: str
    owner: bytes
    salt: bytes

    def salted(self, more: Sequence[str | None]) -> bytes:
        """Return the salt of a request that adds the salts `more`."""
        return self.salt if all(one is None for one in more) else _digest([self.salt.hex(), *more])


def sender_of(address: str, key: str, keys: Sequence[str], share: bool) -> Sender:
    """Return the sender with `key` at `address`, on a server with `keys`. With `share`, all senders have an empty salt.

    With at most one key, clients are told apart by address.
    """
    if len(keys) > 1:
        name, owner = f"key {keys.index(key)}" if key in keys else "", _digest([key])
    else:
        name, owner = network_of(address), _digest([key, address])
    return Sender(name, owner, b"" if share else owner)


def network_of(address: str) -> str:
    """Return the IPv4 address, or the /64 network of an IPv6 address."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if not isinstance(found, IPv6Address):
        return str(found)
    return str(found.ipv4_mapped or ip_network((found, _SITE_BITS), strict=False))


def _digest(parts: Sequence[str | None]) -> bytes:
    return blake2b(json.dumps(parts).encode(), digest_size=_BYTES).digest()
