"""Types of message fields, the sizes that bound them, and a machine's description of itself."""

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
IN_FLIGHT_BYTES = 4 << 20  # requested but not yet received; an interrupted transfer sends at most this much again
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
    """Speed of a node with an accelerator, as in `scheduler.model.machine.NodeMachine`.

    Rates are bytes per second, or operations per second; `start` and `latency` are seconds. `bus` is the bandwidth of
    the host's memory, which compute, transfers and the disk share; 0 means that they share none.
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
    """Typical lengths of a request in tokens: its prompt and its answer."""

    prompt: Count
    answer: Count

    @property
    def tokens(self) -> int:
        """Prompt plus answer tokens."""
        return self.prompt + self.answer


@dataclass(frozen=True)
class GroupBatch:
    """Division of the steps of a batch into micro-batches, equal on all nodes of a group (docs/batching.md).

    All nodes need the same division, because each sum needs a partial result from every node.
    """

    batch: Count  # sequences at once
    micro_batches: Count  # number of parts that the sequences are divided into
    host_attends: bool  # the host computes attention on at least one node: then all nodes look ahead
    chunk: Count  # most tokens in a micro-batch of a prompt


@dataclass(frozen=True)
class Card:
    """A node's accelerators: their memory in bytes, and the owner's options for their use."""

    name: Name
    memory: Bytes
    weights: Weights
    kv: KvPlace
    pipeline: Pipelining
    crossover: Count  # tokens; 0: as measured
    more: tuple[Bytes, ...] = ()  # memory of each further accelerator
    figures: CardFigures | None = None  # speed of the first accelerator and of the host
    shared: bool = False  # one of the accelerators uses the host's memory

    @property
    def options(self) -> OffloadOptions:
        """The options of the card's owner, as an `OffloadOptions`."""
        return OffloadOptions(self.weights, self.kv, self.pipeline, self.crossover or None)


@dataclass(frozen=True)
class MachineSpeed:
    """Speed of a machine's computing and of its disk, measured once within the limits that its owner set.

    `read` is bytes of weights per second for one token, `operations` floating-point operations per second for many
    tokens, `disk` bytes per second read from the disk of the shard cache. 0 means not measured.
    """

    read: PerSecond
    operations: PerSecond
    disk: PerSecond


@dataclass(frozen=True)
class Profile:
    """A machine's description of itself. Sizes in bytes."""

    host: Name
    system: Name
    cores: Count
    threads: Count  # number of compute threads, unless the master asks for fewer
    memory_total: Bytes
    memory_free: Bytes  # the node's budget without --memory: free memory less a margin, within its control groups
    memory_limit: Bytes  # value of --memory; 0: not given
    process_bytes: Bytes  # resident set of the idle process
    disk_free: Bytes  # on the disk of the shard cache
    card: Card | None = None
    speed: MachineSpeed | None = None


@dataclass(frozen=True)
class WindowState:
    """Position of a node's memory window in the cycle of its `blocks` streamed blocks.

    Block number `following` is used next; `ready` blocks from there on are in memory. All are 0 if no block is
    streamed.
    """

    following: Count = 0
    ready: Count = 0
    blocks: Count = 0


NOTHING_STREAMS = WindowState()
