"""Questions to a worker and its answers.

Any node may ask for a worker's condition and test the link to it. Only the worker's master may ask for measurements.
Messages of peers that are not its master must be short.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt

from tpi.errors import MessageError
from tpi.net.codec import ArrayField, Between, message
from tpi.net.fields import Bytes, Count, Id64, Name, PerSecond, Port, Profile, Seconds, Sentence
from tpi.net.messages import PeerAddress
from tpi.trace import PAGE_SPANS

MOST_REACHED = 64  # ports in one Inquiry
MOST_ECHOED = 3584  # bytes: a peer that is not the master may send no more at once


@message
@dataclass(frozen=True)
class Inquiry:
    """Request for a worker's condition, and for a test whether it can connect to the ports of `reach`.

    Any node may send it, whatever master the worker serves. Each entry of `reach` is `host:port`. The worker tries
    those at the sender's own IP address and at nodes of its plan.
    """

    number: Id64  # repeated in the answer
    reach: tuple[Name, ...]

    def __post_init__(self) -> None:
        if len(self.reach) > MOST_REACHED:
            raise MessageError(f"an inquiry names {len(self.reach)} ports; the limit is {MOST_REACHED}")


@message
@dataclass(frozen=True)
class Condition:
    """The answer to an Inquiry: the worker's state, its machine, and the results of the connection test."""

    number: Id64
    version: Name
    name: Name
    used_by: Name  # the master that it serves; empty: none
    used_s: Seconds  # time since it began to serve that master
    clock: Seconds  # since 1970, when the worker answered
    collective_port: Port
    weights_port: Port
    profile: Profile
    unreached: tuple[Name, ...]  # entries of `reach` to which a connection failed
    untried: tuple[Name, ...] = ()  # entries of `reach` at neither the sender's address nor a node of the plan


@message
@dataclass(frozen=True)
class Echo:
    """A message that any worker returns unchanged to any sender. The round-trip time measures the link."""

    number: Id64
    data: Annotated[bytes, Between(0, MOST_ECHOED)]


@message
@dataclass(frozen=True)
class AskLink:
    """Request to both workers of a pair to measure the link between them.

    They connect on the collective plane, as nodes of a plan do. `rank` is the receiver's place in `peers`. The node
    with rank 0 connects to the other one and leads the measurement, which takes about `seconds`.
    """

    session: Id64
    epoch: Count  # of the worker's plan, which stays; 0 before its first plan
    number: Id64  # random; marks the messages of this measurement, and is repeated in the answer
    rank: Annotated[int, Between(0, 1)]
    seconds: Annotated[float, Between(0, 10)]
    peers: tuple[PeerAddress, ...]

    def __post_init__(self) -> None:
        if [peer.rank for peer in self.peers] != [0, 1] or not all(peer.address for peer in self.peers):
            raise MessageError("a link is not between two nodes, of ranks 0 and 1, that both have an address")


@message
@dataclass(frozen=True)
class MeasuredLink:
    """The answer to an AskLink: the link's latency and bandwidth; both are 0 if the other worker was not reached."""

    session: Id64
    epoch: Count
    number: Id64
    latency_s: Seconds
    bytes_per_s: PerSecond


@message
@dataclass(frozen=True)
class AskDisk:
    """Request to measure the disk of the worker's cache, if its speed is not known. That takes about three seconds."""

    session: Id64
    epoch: Count  # of the worker's plan, which stays; 0 before its first plan


@message
@dataclass(frozen=True)
class MeasuredDisk:
    """The answer to an AskDisk: the speed of the disk while other things are computed; 0 if it cannot be measured."""

    session: Id64
    epoch: Count
    bytes_per_s: PerSecond


@dataclass(frozen=True)
class Steady:
    """Analysis of whether a node that streams weights waits for its disk (TPI-LLM, propositions 3 to 6).

    Times are mean seconds of one block unless stated; sizes in bytes.
    """

    attention_s: Seconds
    ffn_s: Seconds
    allreduce_s: Seconds  # of the allreduce after a block
    load_attention_s: Seconds
    load_ffn_s: Seconds
    loose: bool  # proposition 3 holds
    tight: bool  # proposition 4 holds
    steady: bool  # the placement in use is predicted not to wait
    stall_s: Seconds  # predicted wait per token
    window: Count  # number of blocks in memory that would reach the steady state; 0: no number does
    retain: Count  # with that window, one FFN block in every `retain` must stay resident; 0: none
    window_memory: Bytes  # --memory needed for this window
    least_memory: Bytes  # approximate --memory that reaches the steady state if no window does; else 0
    busy_s: Seconds  # compute and allreduce time of one layer
    load_s: Seconds  # load time of one layer


@message
@dataclass(frozen=True)
class AskStats:
    """Request for Stats; with `with_steady` also for the node's `Steady` analysis, which takes long to compute.

    `tail` and `others` are seconds per token that other nodes wait for their disks: `tail` between two tokens, `others`
    during allreduces (`scheduler.model.timeline.OtherWaits`).
    """

    session: Id64
    epoch: Count
    with_steady: bool
    tail: Seconds = 0.0
    others: Seconds = 0.0


@message
@dataclass(frozen=True)
class Stats:
    """Totals of one node since its Assign, as bytes, seconds and counts. The master computes differences."""

    session: Id64
    epoch: Count
    steps: Bytes
    tokens: Bytes
    weight_bytes: Bytes
    resident_bytes: Bytes
    planned_bytes: Bytes  # memory that the node planned to use above its bare process
    peak_rss_bytes: Bytes
    compute_s: Seconds
    sync_s: Seconds
    hop_s: Seconds  # waiting for the hidden states of other stages
    stall_s: Seconds
    streamed_bytes: Bytes
    disk_s: Seconds  # time in which at least one read was under way
    sent_bytes: Bytes
    received_bytes: Bytes
    dropped: Bytes  # malformed or stale messages
    steady: Steady | None  # if requested, the node streams weights, and it has run
    accelerator: Sentence = ""  # description of the accelerator's work; empty without one


@message
@dataclass(frozen=True)
class AskSpans:
    """Request for the node's clock, and for at most `count` spans of its trace from number `first` on.

    It is answered at once, even while a step runs.
    """

    session: Id64
    epoch: Count
    first: Count
    count: Annotated[int, Between(0, PAGE_SPANS)]


@message
@dataclass(frozen=True)
class Spans:
    """The answer to AskSpans.

    Each row has the indices of a span's kind and name, then its begin and end in nanoseconds of the node's clock.
    """

    session: Id64
    epoch: Count
    clock: Bytes  # nanoseconds, when the answer was made
    dropped: Bytes  # number of spans that the trace had no room for
    names: tuple[Name, ...]
    rows: Annotated[npt.NDArray[np.int64], ArrayField("<i8", 2, PAGE_SPANS * 4 * 8)]  # [spans, 4]

    def __post_init__(self) -> None:
        if self.rows.shape[1] != 4:
            raise MessageError(f"spans have {self.rows.shape[1]} columns instead of 4")
