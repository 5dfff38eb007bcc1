"""What a worker is asked and answers: how it is and how far away, by anybody; what it measured, by its master.

Strangers' messages are short.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt

from tpi.errors import MessageError
from tpi.net.codec import ArrayField, Between, message
from tpi.net.fields import Bytes, Count, Id64, Name, Port, Profile, Seconds, Sentence
from tpi.trace import PAGE_SPANS

MOST_REACHED = 64  # ports in one Inquiry
MOST_ECHOED = 3584  # bytes: a stranger may send no more at once


@message
@dataclass(frozen=True)
class Inquiry:
    """Asks a worker how it is, whatever master it serves, and whether it can connect to the ports of `reach`.

    Each is `host:port`. The worker tries those of the asker's own IP address and of nodes of its plan.
    """

    number: Id64  # that the answer carries
    reach: tuple[Name, ...]

    def __post_init__(self) -> None:
        if len(self.reach) > MOST_REACHED:
            raise MessageError(f"an inquiry for {len(self.reach)} ports at once")


@message
@dataclass(frozen=True)
class Condition:
    """The answer to an Inquiry."""

    number: Id64
    version: Name
    name: Name
    used_by: Name  # the master that it serves; empty: nobody
    used_s: Seconds  # for how long
    clock: Seconds  # since 1970, when it answered
    collective_port: Port
    weights_port: Port
    profile: Profile
    unreached: tuple[Name, ...]  # of `reach`: a connection was tried and failed
    untried: tuple[Name, ...] = ()  # of `reach`: neither the asker's nor of a node of the plan


@message
@dataclass(frozen=True)
class Echo:
    """Sent back as it is, by a worker that serves anybody: how long that takes tells of the link."""

    number: Id64
    data: Annotated[bytes, Between(0, MOST_ECHOED)]


@dataclass(frozen=True)
class Steady:
    """Does a node that streams wait for its disk (TPI-LLM, propositions 3 to 6)? Mean seconds of one block; bytes."""

    attention_s: Seconds
    ffn_s: Seconds
    allreduce_s: Seconds  # that follows a block
    load_attention_s: Seconds
    load_ffn_s: Seconds
    loose: bool  # proposition 3 holds
    tight: bool  # proposition 4 holds
    steady: bool  # predicted for the placement in use
    stall_s: Seconds  # predicted per token
    window: Count  # blocks in memory that would reach the steady state; 0: no number does
    retain: Count  # with one FFN block kept in every so many; 0: none need be
    window_memory: Bytes  # of --memory that this would take
    least_memory: Bytes  # where no window does: of --memory that would, about; else 0
    busy_s: Seconds  # that one layer computes and exchanges
    load_s: Seconds  # that one layer loads


@message
@dataclass(frozen=True)
class AskStats:
    """Asks for Stats, and with `with_steady` for the node's `Steady` state, which takes it long to compute.

    `tail` and `others` are seconds per token that other nodes wait: see `scheduler.model.timeline.OtherWaits`.
    """

    session: Id64
    epoch: Count
    with_steady: bool
    tail: Seconds = 0.0
    others: Seconds = 0.0


@message
@dataclass(frozen=True)
class Stats:
    """Totals of one node since its Assign; the master takes differences. Bytes, seconds, counts."""

    session: Id64
    epoch: Count
    steps: Bytes
    tokens: Bytes
    weight_bytes: Bytes
    resident_bytes: Bytes
    planned_bytes: Bytes  # what the node meant to take above its bare process
    peak_rss_bytes: Bytes
    compute_s: Seconds
    sync_s: Seconds
    stall_s: Seconds
    streamed_bytes: Bytes
    disk_s: Seconds  # time in which at least one read was under way
    sent_bytes: Bytes
    received_bytes: Bytes
    dropped: Bytes  # malformed or stale messages
    steady: Steady | None  # if asked for: of a node that streams, once it has run
    accelerator: Sentence = ""  # what it does, where there is one


@message
@dataclass(frozen=True)
class AskSpans:
    """Asks for the node's clock, and for at most `count` spans of its trace from number `first` on.

    Answered at once, also while a step runs.
    """

    session: Id64
    epoch: Count
    first: Count
    count: Annotated[int, Between(0, PAGE_SPANS)]


@message
@dataclass(frozen=True)
class Spans:
    """The answer to AskSpans. Row: kind and name as indices, begin and end in nanoseconds of the node's clock."""

    session: Id64
    epoch: Count
    clock: Bytes  # nanoseconds, when the answer was made
    dropped: Bytes  # spans that the trace had no room for
    names: tuple[Name, ...]
    rows: Annotated[npt.NDArray[np.int64], ArrayField("<i8", 2, PAGE_SPANS * 4 * 8)]  # [spans, 4]

    def __post_init__(self) -> None:
        if self.rows.shape[1] != 4:
            raise MessageError(f"spans have {self.rows.shape[1]} columns in place of 4")
