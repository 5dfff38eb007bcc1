"""What anybody may ask of a worker, whomever it serves: how it is, and how far away. Strangers' messages are short."""

from dataclasses import dataclass
from typing import Annotated

from tpi.errors import MessageError
from tpi.net.codec import Between, message
from tpi.net.fields import Id64, Name, Port, Profile, Seconds

MOST_REACHED = 64  # ports in one Inquiry
MOST_ECHOED = 3584  # bytes: a stranger may send no more at once


@message
@dataclass(frozen=True)
class Inquiry:
    """Asks a worker how it is, whomever it serves; and whether it can connect to the ports of `reach`, `host:port`."""

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
    unreached: tuple[Name, ...]  # of `reach`


@message
@dataclass(frozen=True)
class Echo:
    """Sent back as it is, by a worker that serves anybody: how long that takes tells of the link."""

    number: Id64
    data: Annotated[bytes, Between(0, MOST_ECHOED)]
