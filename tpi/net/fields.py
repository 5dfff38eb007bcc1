"""What fields of messages may hold, the sizes that bound them, and what a machine says of itself."""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt

from tpi.devices.options import KvPlace, OffloadOptions, Pipelining, Weights
from tpi.net.codec import ArrayField, Between
from tpi.pack.layout import RunName
from tpi.text import NAME_CHARACTERS, SENTENCE_CHARACTERS

DIGEST_BYTES = 32  # of one unit, of a block's vectors, and of a block id
TRANSFER_BYTES = 1 << 20  # one run of units on the weights plane, unless a single unit is larger
IN_FLIGHT_BYTES = 4 << 20  # asked for and not yet there: what an interrupted transfer has to send again at most
MAX_STEP_BYTES = 64 << 20  # hidden states of one step

Id64 = Annotated[int, Between(0, 2**64 - 1)]
Count = Annotated[int, Between(0, 2**31 - 1)]
Bytes = Annotated[int, Between(0, 2**62)]
Port = Annotated[int, Between(1, 65535)]
Name = Annotated[str, Between(0, NAME_CHARACTERS)]
Sentence = Annotated[str, Between(0, SENTENCE_CHARACTERS)]
Seconds = Annotated[float, Between(0, 1e12)]
PerSecond = Annotated[float, Between(0, 1e18)]
Digest = Annotated[bytes, Between(DIGEST_BYTES, DIGEST_BYTES)]
Key = Annotated[bytes, Between(0, 32)]  # public; empty: none
Hidden = Annotated[npt.NDArray[np.float32], ArrayField("<f4", 2, MAX_STEP_BYTES)]
Phase = Literal["idle", "load", "compute"]  # of the compute thread; exchanges are part of compute
RunOrVectors = RunName | Literal["vectors"]


@dataclass(frozen=True)
class CardFigures:
    """How fast a node with an accelerator is, as `scheduler.model.machine.NodeMachine` has it.

    Rates are bytes, or operations, per second; `start` and `latency` are seconds. `bus` of 0: nothing is shared.
    """

    host_read: PerSecond
    host_operations: PerSecond
    host_start: Seconds
    disk: PerSecond
    bus: PerSecond
    read: PerSecond
    operations: PerSecond
    start: Seconds
    up: PerSecond
    down: PerSecond
    latency: Seconds


@dataclass(frozen=True)
class UsualRequest:
    """Tokens of most requests: of the prompt, and of the answer."""

    prompt: Count
    answer: Count

    @property
    def tokens(self) -> int:
        """Of both."""
        return self.prompt + self.answer


@dataclass(frozen=True)
class GroupBatch:
    """How all nodes of a group divide the steps of a batch, so that their sums meet (docs/batching.md)."""

    batch: Count  # sequences at once
    micro_batches: Count  # that these are divided into
    host_attends: bool  # on any node: then all look ahead
    chunk: Count  # tokens of a prompt's micro-batch at most


@dataclass(frozen=True)
class Card:
    """The accelerators of a node: their memory in bytes, and what the node's owner says of their use."""

    name: Name
    memory: Bytes
    weights: Weights
    kv: KvPlace
    pipeline: Pipelining
    crossover: Count  # tokens; 0: as measured
    more: tuple[Bytes, ...] = ()  # memory of those beside the first
    figures: CardFigures | None = None  # of the first, and of the host
    shared: bool = False  # the memory of one of them is the host's

    @property
    def options(self) -> OffloadOptions:
        """What the owner says."""
        return OffloadOptions(self.weights, self.kv, self.pipeline, self.crossover or None)


@dataclass(frozen=True)
class MachineSpeed:
    """How fast a machine computes, and reads its disk: measured once, within what its owner lets it use.

    `read` is bytes of weights per second for one token, `operations` floating-point operations per second for many,
    `disk` bytes per second from the disk of its cache; 0: not measured.
    """

    read: PerSecond
    operations: PerSecond
    disk: PerSecond


@dataclass(frozen=True)
class Profile:
    """What a machine says of itself. Sizes in bytes."""

    host: Name
    system: Name
    cores: Count
    threads: Count  # that it will compute with, unless the master asks for fewer
    memory_total: Bytes
    memory_free: Bytes  # that the node allows itself without --memory: less a margin, within its control groups
    memory_limit: Bytes  # of --memory; 0: none given
    process_bytes: Bytes  # resident set of the idle process
    disk_free: Bytes  # where the shard cache is
    card: Card | None = None
    speed: MachineSpeed | None = None


@dataclass(frozen=True)
class WindowState:
    """Where a node's memory window stands: of `blocks` that stream, number `following` comes next, and from it on
    `ready` are in memory. All zeros where nothing streams.
    """

    following: Count = 0
    ready: Count = 0
    blocks: Count = 0


NOTHING_STREAMS = WindowState()
