"""The options of a worker, its ports, and the master that it serves."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from tpi.cachelimit import CacheLimit
from tpi.errors import UsageError
from tpi.keys.policy import KeyPolicy
from tpi.net.fields import Card, MachineSpeed, Profile
from tpi.system.clocks import since_boot
from tpi.text import NAME_CHARACTERS, plain
from worker.profile import measure_machine

_MOST_MEMORY = 1 << 60  # largest --memory in bytes: more than any machine has, but small enough for a message


@dataclass(frozen=True)
class WorkerOptions:
    """The options of a worker. Sizes are in bytes. For `memory` and `threads`, 0 lets the node choose."""

    host: str
    port: int  # 0: any free ports
    name: str
    cache: Path
    memory: int = 0
    threads: int = 0
    cache_limit: CacheLimit | None = None  # None: no limit, because another process limits the cache
    attached: bool = False  # exit when stdin closes, that is, when the parent process is gone
    card: Card | None = None  # the accelerators; None without one
    speed: MachineSpeed | None = None  # None: no master plans with it
    key_policy: KeyPolicy | None = None  # says which other machines may connect; None: those of the user's keys
    model_dir: Path | None = None  # directory of packs on this machine, whose units need not be sent
    announce: bool = False  # announce the worker in the network, if it listens beyond this machine

    def __post_init__(self) -> None:
        if not self.name or plain(self.name) != self.name:
            raise UsageError(f"--name takes printable text of 1 to {NAME_CHARACTERS} characters")
        if not 0 <= self.memory <= _MOST_MEMORY:
            raise UsageError("--memory is more than any machine has; write for example 4GiB")

    def profile(self) -> Profile:
        """Return the profile of this machine as it is now, with the speed of its disk if that is known."""
        return measure_machine(self.cache, self.threads, self.memory, self.card, self._speed_now())

    def _speed_now(self) -> MachineSpeed | None:
        if self.speed is None:
            return None
        from worker.measure.speed import known_disk  # imports more than a worker without a speed needs

        return replace(self.speed, disk=known_disk(self.cache.parent) or self.speed.disk)


@dataclass(frozen=True)
class Ports:
    """The ports of the control, collective and weights planes."""

    control: int
    collective: int
    weights: int


@dataclass
class ServedMaster:
    """The master that the worker serves.

    `profile` is the description of this machine that the master got and plans with.
    """

    identity: bytes
    session: int
    name: str
    profile: Profile
    key: bytes  # public key that it has proved to own; empty if it is on this machine
    since: float = field(default_factory=since_boot)
    epoch: int = 0
    plan: frozenset[str] = frozenset()  # `host:port` of the collective plane of each node of its plan
    node_keys: frozenset[bytes] = frozenset()  # keys of the nodes of its plan; the master vouches for them

    def is_sender(self, peer: bytes, key: bytes, message: object) -> bool:
        """Return True if a message from the connection `peer`, whose owner has `key`, is from this master."""
        return (peer, key) == (self.identity, self.key) and getattr(message, "session", None) == self.session
