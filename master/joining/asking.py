"""Asking workers how they are, without having them serve anybody."""

import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import zmq

from master.workers.dial import Dial, Line
from master.workers.reach import obstacle
from tpi.errors import UsageError
from tpi.net.channel import Channel, UnreachableError
from tpi.net.codec import WrongProtocolError
from tpi.net.messages import Condition, Inquiry
from tpi.net.sockets import Net, split_address

ANSWER_S = 5.0
_SLICE_MS = 50


@dataclass
class Asked:
    """One worker: what it answered, or why not. Times in seconds."""

    address: str
    reach: tuple[str, ...] = ()  # `host:port` that it is to try
    condition: Condition | None = None
    problem: str = ""
    round_trip: float = 0.0
    key: bytes = b""
    _line: Line | None = None
    _channel: Channel | None = None
    _dial: Dial | None = None
    _number: int = field(default_factory=lambda: secrets.randbits(64))
    _sent_at: float = 0.0

    @property
    def done(self) -> bool:
        """Whether there is no more to be learnt."""
        return self.condition is not None or bool(self.problem)

    def begin(self, net: Net) -> None:
        """Call it."""
        try:
            self._dial = Dial(net, self.address, b"Q" + secrets.token_bytes(8))
        except UsageError as error:
            self.problem = str(error)

    def look(self) -> None:
        """Take in what has come, and ask when somebody answers."""
        if self.done or self._dial is None:
            return
        if self._channel is None and (line := self._dial.answered()):
            self._line, self._channel, self.key = line, Channel(line.socket), line.key
            with suppress(UnreachableError):
                self._sent_at = time.monotonic()
                self._channel.send(Inquiry(self._number, self.reach))
        for _, message in self._channel.batch() if self._channel else ():
            self._take(message)
        self.problem = self.problem or self._dial.obstacle()

    @property
    def sockets(self) -> list[object]:
        """What to poll while waiting."""
        found: list[object] = list(self._dial.sockets) if self._dial else []
        return [*found, self._line.socket] if self._line else found

    def close(self) -> None:
        """Hang up."""
        if self._dial:
            self._dial.close()
        if self._line:
            self._line.close()

    def _take(self, message: object) -> None:
        if isinstance(message, WrongProtocolError):
            self.problem = f"it is of another version: {message}"
        elif isinstance(message, Condition) and message.number == self._number:
            self.condition, self.round_trip = message, time.monotonic() - self._sent_at


def ask(
    net: Net, addresses: Sequence[str], reach: Mapping[str, tuple[str, ...]] | None = None, seconds: float = ANSWER_S
) -> list[Asked]:
    """Ask the workers at `addresses`, all at once; `reach` are the ports that each is to try, by its address."""
    asked = [Asked(address, (reach or {}).get(address, ())) for address in addresses]
    ends = time.monotonic() + seconds
    with ExitStack() as stack:
        for one in asked:
            stack.callback(one.close)
            one.begin(net)
        while not all(one.done for one in asked) and time.monotonic() < ends:
            poller = zmq.Poller()
            for each in (each for one in asked for each in one.sockets):
                poller.register(each, zmq.POLLIN)
            poller.poll(_SLICE_MS)
            for one in asked:
                one.look()
    for one in asked:
        if not one.done:
            one.problem = obstacle(*split_address(one.address)) or f"no worker answers at {one.address}"
    return asked
