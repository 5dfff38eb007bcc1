"""What a worker says of itself to everybody in its network (mDNS, RFC 6762 and 6763): nothing that is a secret.

Nothing of it is believed either: whoever answers at the address has to prove that the key is its own.
"""

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from tpi.errors import UsageError
from tpi.keys.text import key_text, parse_key, short_key
from tpi.text import plain

SERVICE = "_tpi._tcp.local."
_NAME_BYTES = 40  # of an instance's name, beside its key (63 in all)
_FIELD_BYTES = 250  # of a field of a text record, beside "name=" (255 in all)


@dataclass(frozen=True)
class Announcement:
    """A worker that listens at `port` of any of `hosts` (addresses), and has `key`."""

    name: str
    key: bytes
    port: int
    hosts: tuple[str, ...]

    @property
    def instance(self) -> str:
        """Its name in the network, which no other key has."""
        label = _cut(self.name, _NAME_BYTES).replace(".", " ")
        return f"{label} {short_key(self.key)}.{SERVICE}"

    @property
    def properties(self) -> dict[str, str]:
        """The text record."""
        return {"name": _cut(self.name[:64], _FIELD_BYTES), "key": key_text(self.key)}

    @property
    def packed_hosts(self) -> list[bytes]:
        """The addresses as the network has them."""
        return [socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host) for host in self.hosts]

    @property
    def addresses(self) -> list[str]:
        """`HOST:PORT` of each host."""
        return [f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}" for host in self.hosts]


def _cut(text: str, most: int) -> str:
    """As many whole characters of `text` as fit into `most` bytes."""
    return text.encode()[:most].decode(errors="ignore")


def read_announcement(properties: Mapping[bytes, bytes | None], port: int, hosts: list[str]) -> Announcement | None:
    """What somebody has announced; None if it is no announcement of a worker."""
    try:
        key = parse_key((properties.get(b"key") or b"").decode())
        name = plain((properties.get(b"name") or b"").decode(errors="replace"), 64)
    except (UsageError, UnicodeDecodeError):
        return None
    usable = tuple(host for host in hosts if "%" not in host)
    return Announcement(name or short_key(key), key, port, usable) if usable and 0 < port < 65536 else None
