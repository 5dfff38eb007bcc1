"""The weights plane's messages: units of blocks by their content's name, fenced by their hashes alone.

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
    """Opens the weights plane, again after every broken connection: the worker may ask now (what it asked is void)."""

    session: Id64


@message
@dataclass(frozen=True)
class Missing:
    """How much the worker will ask for, before its first Need. A worker that lacks nothing says nothing."""

    session: Id64
    epoch: Count
    units: Bytes
    nbytes: Bytes


@message
@dataclass(frozen=True)
class Need:
    """Asks for the units `[first, last)` of a run, or for a block's vectors (run "vectors", first 0, last 1)."""

    block: Digest
    run: RunOrVectors
    first: Count
    last: Count


@message
@dataclass(frozen=True)
class UnitData:
    """The answer to a Need: the units back to back. Fenced by their hashes alone."""

    block: Digest
    run: RunOrVectors
    first: Count
    last: Count
    data: Annotated[memoryview, Raw(1 << 28)]


@message
@dataclass(frozen=True)
class Unavailable:
    """The answer to a Need that the master cannot serve."""

    block: Digest
    reason: Sentence
