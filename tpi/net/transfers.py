"""The weights plane's messages. Blocks are named by the hash of their content.

Data is accepted if its hash is right; the epoch is not compared.

worker -> master: Missing, Need
master -> worker: Offer, UnitData, Unavailable
"""

from dataclasses import dataclass
from typing import Annotated

from tpi.net.codec import Raw, message
from tpi.net.fields import Bytes, Count, Digest, Id64, RunOrVectors, Sentence


@message
@dataclass(frozen=True)
class Offer:
    """Permission for the worker to send requests. Sent when the weights plane connects, and after every reconnection.

    Requests that the worker sent before are void.
    """

    session: Id64


@message
@dataclass(frozen=True)
class Missing:
    """Amount of data that the worker will request, sent before its first Need.

    A worker that lacks nothing does not send it.
    """

    session: Id64
    epoch: Count
    units: Bytes
    nbytes: Bytes


@message
@dataclass(frozen=True)
class Need:
    """Request for the units `[first, last)` of a run, or for a block's vectors (run "vectors", first 0, last 1)."""

    block: Digest
    run: RunOrVectors
    first: Count
    last: Count


@message
@dataclass(frozen=True)
class UnitData:
    """Answer to a Need: the units back to back. The receiver checks them against their hashes."""

    block: Digest
    run: RunOrVectors
    first: Count
    last: Count
    data: Annotated[memoryview, Raw(1 << 28)]


@message
@dataclass(frozen=True)
class Unavailable:
    """Answer to a Need that the master cannot serve."""

    block: Digest
    reason: Sentence
