"""Access policy of a process: which keys may connect, and which key it connects with.

`tpi.net.sockets.Net` asks it about each connection to or from another machine.
"""

import ipaddress
import logging
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path

from tpi.config import default_config
from tpi.errors import UsageError
from tpi.keys.identity import Identity, load_identity
from tpi.keys.ring import KeyRing, TrustedKeys

log = logging.getLogger(__name__)


def leaves_machine(host: str) -> bool:
    """Return True unless `host` is a loopback address or `localhost`."""
    bare = host.strip("[]")
    if bare == "localhost":
        return False
    try:
        return not ipaddress.ip_address(bare.partition("%")[0]).is_loopback
    except ValueError:
        return True  # a host name, which may be any machine


class KeyPolicy:
    """The access policy of one process. Its methods may be called by any thread.

    The machine's own key is always admitted, because its owner can read this machine's files anyway.
    """

    def __init__(
        self,
        folder: Path | None = None,
        outside: Callable[[str], bool] = leaves_machine,
        locked: bool = True,
    ) -> None:
        """Create a policy from the keys in `folder` (None: the user's own).

        `outside(host)` returns True if connections with `host` need keys. If `locked` is False, no connection needs
        keys.
        """
        self._folder = folder
        self.locked = locked
        self.guests: frozenset[bytes] = frozenset()  # keys introduced by a paired master, for the collective plane only
        self._outside = outside
        self._last_reason = ""  # the last reason logged for trusting no key

    @cached_property
    def folder(self) -> Path:
        """The directory of the keys. Raises UsageError if the user has no home directory and names no other."""
        return self._folder or default_config()

    @cached_property
    def _ring(self) -> KeyRing:
        return KeyRing(self.folder)

    @cached_property
    def identity(self) -> Identity:
        """The key pair of this machine. Raises UsageError if it cannot be read or made."""
        return load_identity(self.folder)

    @property
    def keys(self) -> TrustedKeys:
        """The keys that are trusted now; none if the file is damaged or cannot be read. The reason is logged once."""
        try:
            return self._ring.read()
        except UsageError as error:
            if self._last_reason != str(error):
                self._last_reason = str(error)
                log.warning("no other machine is trusted: %s", error)
            return TrustedKeys()

    def guards(self, host: str) -> bool:
        """Return True if connections from or to `host` need keys."""
        return self.locked and self._outside(host)

    def admits(self, key: bytes, sums: bool = False) -> bool:
        """Return True if the owner of `key` may connect now; with `sums`, to the collective plane."""
        return self._admits(self.keys, key, sums)

    def trusted(self, host: str) -> tuple[bytes, ...]:
        """Return the keys that a machine at `host` may have, likely ones first. This machine's own key is the last."""
        paired = sorted(self.keys.paired, key=lambda one: (one.host != host.strip("[]"), -one.since))
        return (*(one.key for one in paired), self.identity.public)

    def name_of(self, key: bytes) -> str:
        """Return the name of a paired machine; empty if `key` is not paired."""
        found = self.keys.find(key)
        return found.name if found else ""

    def any_refused(self, keys: Iterable[bytes], sums: bool = True) -> bool:
        """Return True if at least one of `keys` may not connect; with `sums`, not even to the collective plane."""
        trusted = self.keys
        return any(key and not self._admits(trusted, key, sums) for key in keys)

    def _admits(self, trusted: TrustedKeys, key: bytes, sums: bool) -> bool:
        if key == self.identity.public or trusted.find(key) is not None:
            return True
        return sums and key in self.guests and key not in trusted.revoked
