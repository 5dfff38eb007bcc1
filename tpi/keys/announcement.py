"""A worker's announcement of itself in its local network (mDNS, RFC 6762 and 6763). It contains nothing secret.

Receivers do not trust it: the machine at the address must prove that it owns the announced key.
"""

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from tpi.errors import UsageError
from tpi.keys.text import key_text, parse_key, short_key
from tpi.text import plain

SERVICE = "_tpi._tcp.local."
_NAME_BYTES = 40  # limit of a worker's name within an instance label, which is at most 63 bytes with the key
_FIELD_BYTES = 250  # limit of a field's value in a text record; the field is at most 255 bytes with "name="


@dataclass(frozen=True)
class Announcement:
    """A worker that listens at `port` on each of `hosts` (addresses), and owns `key`."""

    name: str
    key: bytes
    port: int
    hosts: tuple[str, ...]

    @property
    def instance(self) -> str:
        """The worker's DNS-SD instance name. The short key in it makes it unique."""
        label = _cut(self.name, _NAME_BYTES).replace(".", " ")
        return f"{label} {short_key(self.key)}.{SERVICE}"

    @property
    def properties(self) -> dict[str, str]:
        """The fields of the DNS-SD text record."""
        return {"name": _cut(self.name[:64], _FIELD_BYTES), "key": key_text(self.key)}

    @property
    def packed_hosts(self) -> list[bytes]:
        """The addresses of this machine, in network byte order."""
        return [socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host) for host in self.hosts]

    @property
    def addresses(self) -> list[str]:
        """The worker's addresses as `HOST:PORT`, one for each host."""
        return [f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}" for host in self.hosts]


def _cut(text: str, most: int) -> str:
    return text.encode()[:most].decode(errors="ignore")


def read_announcement(properties: Mapping[bytes, bytes | None], port: int, hosts: list[str]) -> Announcement | None:
    """Return the announcement of a worker that a DNS-SD record contains, or None if it is not one."""
    try:
        key = parse_key((properties.get(b"key") or b"").decode())
        name = plain((properties.get(b"name") or b"").decode(errors="replace"), 64)
    except (UsageError, UnicodeDecodeError):
        return None
    usable = tuple(host for host in hosts if "%" not in host)
    return Announcement(name or short_key(key), key, port, usable) if usable and 0 < port < 65536 else None
