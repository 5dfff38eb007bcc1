"""What a worker was told, where it listens, and whom it serves."""

from dataclasses import dataclass, field
from pathlib import Path

from tpi.cachelimit import CacheLimit
from tpi.errors import UsageError
from tpi.keys.policy import KeyPolicy
from tpi.net.fields import Card, MachineSpeed, Profile
from tpi.system.clocks import since_boot
from tpi.text import NAME_CHARACTERS, plain
from worker.profile import measure_machine

_MOST_MEMORY = 1 << 60  # bytes that --memory may say: more than any machine has, less than a message can hold


@dataclass(frozen=True)
class WorkerOptions:
    """What the user told this worker. 0 leaves the choice to the node; sizes in bytes."""

    host: str
    port: int  # 0: any free ones
    name: str
    cache: Path
    memory: int = 0
    threads: int = 0
    cache_limit: CacheLimit | None = None  # of the cache; None: somebody else sees to that
    attached: bool = False  # leave when stdin closes, that is when the parent process is gone
    card: Card | None = None  # its accelerator
    speed: MachineSpeed | None = None  # None: nobody plans by it
    door: KeyPolicy | None = None  # who may connect from other machines; None: by the user's keys
    model_dir: Path | None = None  # with packs, from which units come rather than over the network
    announce: bool = False  # tell the network that it is there, if it listens beyond this machine

    def __post_init__(self) -> None:
        if not self.name or plain(self.name) != self.name:
            raise UsageError(f"--name takes printable text of 1 to {NAME_CHARACTERS} characters")
        if not 0 <= self.memory <= _MOST_MEMORY:
            raise UsageError("--memory is more than any machine has; write for example 4GiB")

    def profile(self) -> Profile:
        """This machine as it is now."""
        return measure_machine(self.cache, self.threads, self.memory, self.card, self.speed)


@dataclass(frozen=True)
class Ports:
    """Where the three planes listen."""

    control: int
    collective: int
    weights: int


@dataclass
class ServedMaster:
    """The master that is being served. `profile` is what it was told of this machine, and plans with."""

    identity: bytes
    session: int
    name: str
    profile: Profile
    key: bytes  # that it has proved to own; empty on this machine
    since: float = field(default_factory=since_boot)
    epoch: int = 0
    plan: frozenset[str] = frozenset()  # `host:port` at which the nodes of its plan sum
    guests: frozenset[bytes] = frozenset()  # keys of those with whom its plan has this worker sum: it answers for them

    def sent(self, peer: bytes, key: bytes, message: object) -> bool:
        """Whether a message that came from `peer`, the owner of `key`, is this master's."""
        return (peer, key) == (self.identity, self.key) and getattr(message, "session", None) == self.session
