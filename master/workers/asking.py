"""Questions to workers about their state, without making the workers serve this machine."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from math import inf

import zmq

from allreduce.cache import end_of
from master.workers.dial import Dial, Line
from master.workers.reach import obstacle, other_port
from tpi import __version__
from tpi.errors import UsageError
from tpi.net.channel import Channel, UnreachableError
from tpi.net.codec import WrongProtocolError, protocol
from tpi.net.questions import MOST_ECHOED, Condition, Echo, Inquiry
from tpi.net.sockets import Net, split_address
from tpi.text import SENTENCE_CHARACTERS, plain
from tpi.topology.links import Link

ANSWER_S = 5.0
_SLICE_MS = 50
_PINGS = 4
_BURST = 32  # messages that are sent to measure the rate of a link


@dataclass
class WorkerInquiry:
    """A question to one worker, with its answer or the reason why there is none. Times are in seconds."""

    address: str
    reach: tuple[str, ...] = ()  # addresses (`host:port`) to which the worker tries to connect
    condition: Condition | None = None
    problem: str = ""
    round_trip: float = 0.0
    key: bytes = b""
    name: str = ""  # the worker's name on this machine, once it has answered
    link: Link | None = None  # set by `measure_link`
    _line: Line | None = None
    _channel: Channel | None = None
    _dial: Dial | None = None
    _called: Callable[[bytes], str] = lambda key: ""  # returns this machine's name for the owner of a key
    _number: int = field(default_factory=lambda: secrets.randbits(64))
    _sent_at: float = 0.0

    @property
    def done(self) -> bool:
        """True if the worker has answered or a problem was found."""
        return self.condition is not None or bool(self.problem)

    @property
    def unwilling(self) -> str:
        """The reason why the worker would not serve this machine now; empty if it would."""
        said = self.condition
        if said is None:
            return self.problem
        return f"it is in use by {said.used_by}" if said.used_by else ""

    @property
    def answered(self) -> bool:
        """True if a worker answers at the address, whatever protocol it speaks."""
        return self._channel is not None

    @property
    def end(self) -> str:
        """The name of the worker in the cache of measured links; empty if it has not answered."""
        if self.condition is None:
            return ""
        return end_of(self.key, f"tcp://{split_address(self.address)[0]}:{self.condition.collective_port}")

    @property
    def in_use(self) -> bool:
        """True if the worker serves another master."""
        said = self.condition
        return said is not None and bool(said.used_by)

    def begin(self, net: Net) -> None:
        """Start connecting to the worker."""
        self._called = net.policy.name_of
        try:
            self._dial = Dial(net, self.address, b"Q" + secrets.token_bytes(8))
        except UsageError as error:
            self.problem = str(error)

    def look(self) -> None:
        """Process the messages that have arrived. When a connection is open, send the question."""
        if self.done or self._dial is None:
            return
        if self._channel is None and (line := self._dial.answered()):
            self._line, self._channel, self.key = line, Channel(line.socket), line.key
            with suppress(UnreachableError):
                self._sent_at = time.monotonic()
                self._channel.send(Inquiry(self._number, self.reach))
        for _, message in self._channel.receive_batch() if self._channel else ():
            self._take(message)
        self.problem = self.problem or self._dial.obstacle()

    def measure_link(self, going_on: Callable[[], bool]) -> None:
        """Measure the link with messages that the worker echoes, while `going_on` returns True."""
        short = min(self._echoed(1, b"", going_on) for _ in range(_PINGS))
        long = min(self._echoed(_BURST, bytes(MOST_ECHOED), going_on) for _ in range(_PINGS))
        if long < inf:
            self.link = link_from(short, long, _BURST * MOST_ECHOED)

    @property
    def sockets(self) -> list[object]:
        """Sockets to poll while waiting."""
        found: list[object] = list(self._dial.sockets) if self._dial else []
        return [*found, self._line.socket] if self._line else found

    def close(self) -> None:
        """Close the connections to the worker."""
        if self._dial:
            self._dial.close()
        if self._line:
            self._line.close()

    def _echoed(self, count: int, data: bytes, going_on: Callable[[], bool]) -> float:
        """Send `data` to the worker `count` times; return the seconds until it has come back as often.

        If some echoes are missing when `going_on` returns False, extrapolate from the others; infinity if none came.
        """
        if self._channel is None or self.condition is None or not going_on():
            return inf
        number, left, begun = secrets.randbits(64), count, time.monotonic()
        with suppress(UnreachableError):
            for _ in range(count):
                self._channel.send(Echo(number, data))
        while left and going_on():
            self._channel.socket.poll(_SLICE_MS)
            came = sum(isinstance(one, Echo) and one.number == number for _, one in self._channel.receive_batch())
            left -= min(came, left)  # a worker may echo more than it was sent
        return (time.monotonic() - begun) * count / (count - left) if left < count else inf

    def _take(self, message: object) -> None:
        if isinstance(message, WrongProtocolError):
            other, own = plain(str(message), SENTENCE_CHARACTERS), f"tpi {__version__} (protocol {protocol():x})"
            self.problem = f"it runs {other}, this machine runs {own}; install the same version on both"
        elif isinstance(message, Condition) and message.number == self._number:
            self.round_trip = time.monotonic() - self._sent_at
            self.condition = said = _shown(message, self.reach)
            self.name = self._called(self.key) or said.name or self.address


def _shown(said: Condition, asked: Sequence[str]) -> Condition:
    """Return a worker's answer without control characters, and without ports that were not `asked` for."""
    profile = replace(said.profile, host=plain(said.profile.host), system=plain(said.profile.system))
    if profile.card is not None:
        profile = replace(profile, card=replace(profile.card, name=plain(profile.card.name)))
    version, name, used_by = map(plain, (said.version, said.name, said.used_by))
    unreached = tuple(one for one in asked if one in said.unreached)
    untried = tuple(one for one in asked if one in said.untried)
    return replace(
        said, version=version, name=name, used_by=used_by, profile=profile, unreached=unreached, untried=untried
    )


def link_from(short: float, long: float, nbytes: int) -> Link:
    """Return the link of Hockney's model whose round trip takes `short` s, and `long` s with `nbytes` of data."""
    return Link(max(short / 2, 1e-6), 2 * nbytes / max(long - short, 1e-6))


def ask(
    net: Net,
    addresses: Sequence[str],
    reach: Mapping[str, tuple[str, ...]] | None = None,
    seconds: float = ANSWER_S,
    links: bool = False,
    wanted: Callable[[], bool] = lambda: True,
) -> list[WorkerInquiry]:
    """Ask the workers at `addresses`, all at once; return the inquiries in the order of `addresses`.

    Args:
        reach: by address of a worker, the addresses to which the worker tries to connect.
        seconds: how long to wait for answers, and for each measurement.
        links: also measure the link to each worker, one after the other.
        wanted: stop early once this returns False.
    """
    asked = [WorkerInquiry(address, (reach or {}).get(address, ())) for address in addresses]
    going_on = _within(seconds, wanted)
    with ExitStack() as stack:
        for one in asked:
            stack.callback(one.close)
            one.begin(net)
        while not all(one.done for one in asked) and going_on():
            poller = zmq.Poller()
            for each in (each for one in asked for each in one.sockets):
                poller.register(each, zmq.POLLIN)
            poller.poll(_SLICE_MS)
            for one in asked:
                one.look()
        for one in asked if links else ():
            one.measure_link(_within(seconds, wanted))
    for one in asked:
        if not one.done:
            no_worker = other_port(one.address) if one.answered else f"no worker answers at {one.address}"
            one.problem = obstacle(*split_address(one.address)) or no_worker
    return asked


def _within(seconds: float, wanted: Callable[[], bool]) -> Callable[[], bool]:
    ends = time.monotonic() + seconds
    return lambda: wanted() and time.monotonic() < ends
