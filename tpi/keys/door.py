"""Who may come in from other machines, and with which key this one goes out: what `tpi.net.sockets.Net` decides by."""

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
    """Whether who listens at, or connects to, `host` is to be reached from other machines."""
    bare = host.strip("[]")
    if bare == "localhost":
        return False
    try:
        return not ipaddress.ip_address(bare.partition("%")[0]).is_loopback
    except ValueError:
        return True  # a name: whatever it means


class Door:
    """One process's lock. Its own key is always let in: who has it can read this machine's files anyway.

    Its methods may be called by any thread.
    """

    def __init__(
        self,
        folder: Path | None = None,
        outside: Callable[[str], bool] = leaves_machine,
        locked: bool = True,
    ) -> None:
        """`folder` has the keys (None: the user's own). `outside` says which hosts need one; unlocked: none does."""
        self._folder = folder
        self.locked = locked
        self.guests: frozenset[bytes] = frozenset()  # whom a paired master introduces, for sums alone
        self._outside = outside
        self._said = ""  # why nobody was trusted when it was last found out

    @cached_property
    def folder(self) -> Path:
        """The directory of the keys. Raises UsageError if the user has no home directory and sets none."""
        return self._folder or default_config()

    @cached_property
    def _ring(self) -> KeyRing:
        return KeyRing(self.folder)

    @cached_property
    def identity(self) -> Identity:
        """This machine's key pair. Raises UsageError if it cannot be read or made."""
        return load_identity(self.folder)

    @property
    def keys(self) -> TrustedKeys:
        """Who is trusted now; nobody where the file is damaged or cannot be read, which is said once."""
        try:
            return self._ring.read()
        except UsageError as error:
            if self._said != str(error):
                self._said = str(error)
                log.warning("nobody is trusted: %s", error)
            return TrustedKeys()

    def guards(self, host: str) -> bool:
        """Whether connections from or to `host` need keys."""
        return self.locked and self._outside(host)

    def admits(self, key: bytes, sums: bool = False) -> bool:
        """Whether the owner of `key` may connect now; with `sums`, to the plane on which nodes sum."""
        return self._admits(self.keys, key, sums)

    def trusted(self, host: str) -> tuple[bytes, ...]:
        """The keys of whom may be met at `host`, likely ones first: this machine's own, too."""
        paired = sorted(self.keys.paired, key=lambda one: (one.host != host.strip("[]"), -one.since))
        return (*(one.key for one in paired), self.identity.public)

    def name_of(self, key: bytes) -> str:
        """What a paired machine is called; empty if it is not paired."""
        found = self.keys.find(key)
        return found.name if found else ""

    def any_refused(self, keys: Iterable[bytes], sums: bool = True) -> bool:
        """Whether the owner of one of `keys` may not connect any more: not even to sum, or not to another plane."""
        trusted = self.keys
        return any(key and not self._admits(trusted, key, sums) for key in keys)

    def _admits(self, trusted: TrustedKeys, key: bytes, sums: bool) -> bool:
        if key == self.identity.public or trusted.find(key) is not None:
            return True
        return sums and key in self.guests and key not in trusted.revoked
