"""The master's connection to one worker: messages, heartbeats, and the worker's last answers."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import islice

from master.workers.dial import Dial, Line
from master.workers.heartbeats import SILENCE_S, HeartbeatState
from master.workers.places import WorkerId
from master.workers.weights import WeightServer
from tpi import __version__
from tpi.errors import NodeError, NodeInUse, NodeLost, NodeRefused, NodeTwice, TpiError, WeightsError
from tpi.keys.text import short_key
from tpi.net.channel import Channel, UnreachableError
from tpi.net.codec import Buffer, WrongProtocolError, encode, protocol
from tpi.net.messages import (
    Alive,
    Bye,
    Failure,
    Heartbeat,
    Hello,
    Join,
    PeerAddress,
    Ready,
    Refuse,
    master_identity,
)
from tpi.net.monitor import drop_incoming
from tpi.net.questions import Echo, MeasuredDisk, MeasuredLink, Spans, Stats
from tpi.net.sockets import WEIGHTS, Net, split_address
from tpi.system.clocks import since_boot
from tpi.text import SENTENCE_CHARACTERS, plain, with_address

ALIVE_S = 1.0  # seconds between the `Alive` messages that a worker gets
_ALIVE_SLOW_S = 5.0  # the same for a worker that does not seem to read the messages
_SEND_MS, _SEND_TRIES = 50, 40  # milliseconds to wait for space in a worker's queue, and number of attempts
_MOST_CHANGES = 64  # connection events that are handled at once


class RemoteWorker:
    """The connection to one worker. All methods belong to one thread at a time; none blocks for long."""

    def __init__(self, net: Net, address: str, session: int, link: int, master: str, key: bytes = b"") -> None:
        """Start connecting; with a `key`, only to its owner.

        Args:
            net: the sockets of this process.
            address: the worker's `HOST:PORT`.
            session: the random number of this run of the master.
            link: a number for this connection, different for each address within the session.
            master: this master's name, for the worker and for messages.
            key: the worker's public key; empty: any worker that this machine trusts.

        Raises:
            UsageError: if `address` is not an address, the key is not trusted, or this machine's own key cannot be
                used.
        """
        self.address = address
        self.name = address
        self.hello: Hello | None = None
        self.ready: Ready | None = None
        self.stats: Stats | None = None
        self.spans: Spans | None = None
        self.link: MeasuredLink | None = None
        self.disk: MeasuredDisk | None = None
        self.feeder: WeightServer | None = None
        self.heartbeats = HeartbeatState()
        self.dropped = 0
        self.connected = False
        self.idle = False  # the worker reported that it computes nothing
        self.admitted: bool | None = None  # True if it may join a run that measures workers; None: not measured yet
        self.key = b""  # the key that the worker has proved to own; empty on this machine
        self.problem: TpiError | None = None  # an error found while no caller could handle it
        self._alive_at = 0.0
        self._joined_at = 0.0  # time when `Join` was last sent
        self._net = net
        self._identity = master_identity(session, link)
        self._session = session
        self.epoch = 0  # number of the last plan that it was given
        self._master = master
        self._host, self._port = split_address(address)
        self._dial = Dial(net, address, self._identity, key)
        self._line: Line | None = None
        self._channel: Channel | None = None  # None until the worker has answered

    @property
    def id(self) -> WorkerId:
        """The identity of the worker."""
        return WorkerId(self.address, self.key)

    @property
    def sockets(self) -> Iterable[object]:
        """Sockets to poll while waiting."""
        yield from self._dial.sockets
        if self._line:
            yield self._line.socket
            yield self._line.monitor.events
        if self.feeder:
            yield self.feeder.channel.socket
            yield self.feeder.monitor.events

    def peer(self, rank: int) -> PeerAddress:
        """Return the worker as node `rank` of the collective plane, with its address and key."""
        assert self.hello
        return PeerAddress(rank, self.name, f"tcp://{self._host}:{self.hello.collective_port}", self.key)

    def expect(self, epoch: int) -> None:
        """Prepare for a new plan: messages of other epochs are dropped from now on."""
        self.epoch, self.ready, self.stats = epoch, None, None
        if not isinstance(self.problem, NodeLost | NodeRefused):
            self.problem = None  # a problem of an earlier plan does not count
        self.heartbeats.advanced, self.heartbeats.missed = since_boot(), -1

    def send(self, message: object) -> None:
        """Queue a message.

        Raises:
            NodeLost: if there is no connection.
        """
        self.send_frames(encode(message))

    def send_frames(self, frames: list[Buffer]) -> None:
        """Queue an encoded message.

        Raises:
            NodeLost: if there is no connection.
        """
        for _ in range(_SEND_TRIES):
            if self._sent(frames):
                self._alive_at = self.heartbeats.looked + ALIVE_S  # any message shows that the master lives
                return
            self.serve()  # the queue is full or the connection has ended; serve() stores the reason
            if self.problem is not None:
                raise self.problem
        raise self.lost("its connection is gone")

    def serve(self) -> None:
        """Process the messages that have arrived, and send signs of life. Errors are stored as `problem`."""
        now = since_boot()
        self.heartbeats.look(now)
        try:
            self._serve()
        except TpiError as error:
            self.problem = self.problem or error
        if self._channel and self.hello and self.connected and now >= self._alive_at:
            self._alive_at = now + (_ALIVE_SLOW_S if now - self.heartbeats.seen > SILENCE_S else ALIVE_S)
            with suppress(UnreachableError):  # a lost connection matters only when the worker is needed
                self._channel.offer(Alive(self._session))
        if self._channel and self.hello and self.heartbeats.link.due(now):
            with suppress(UnreachableError):
                self._channel.offer(Echo(self.heartbeats.link.begin(now), b""))

    def judge(self, now: float) -> None:
        """Raise an error unless the worker, which is needed now, is alive and has not failed.

        Raises:
            NodeLost, NodeRefused, NodeError: if the worker is gone, refuses, or has failed.
        """
        if self.problem is not None:
            raise self.problem
        if self.hello and self.heartbeats.silent(now):
            raise self.lost(f"nothing was heard from it for {now - self.heartbeats.seen:.1f} s")

    def gone(self, now: float) -> bool:
        """Return True if the worker cannot be used any more."""
        return isinstance(self.problem, NodeLost | NodeRefused) or not self.connected or self.heartbeats.silent(now)

    def lost(self, reason: str) -> NodeLost:
        """Return a NodeLost error that names this worker and the `reason`."""
        return NodeLost(
            self.name, f"worker {self._who} is lost: {reason}; check that it runs and can be reached, then start again"
        )

    def close(self, linger_ms: int) -> None:
        """Send `Bye` if the worker has answered, then close the connections."""
        if self._channel and self.hello and self.connected:
            try:
                self._channel.send(Bye(self._session))
            except UnreachableError:
                linger_ms = 0
        if self.feeder:
            self.feeder.close()
        self._dial.close()
        if self._line and self._channel:
            self._line.monitor.close()
            self._channel.close(linger_ms)

    def obstacle(self) -> str:
        """Return the reason why the machine at the address cannot be trusted; empty if it can be trusted."""
        return "" if self._channel else self._dial.obstacle()

    def _serve(self) -> None:
        if not self._line and (line := self._dial.answered()):
            self._line, self.key = line, line.key
            self.name = self._net.policy.name_of(line.key) or self.name
            self._channel = Channel(line.socket, self._net.tap)
            line.socket.sndtimeo = _SEND_MS
            self._connection(connected=True)
        if not self._line or not self._channel:
            return
        if self.key and not self._net.policy.admits(self.key):
            self._lock_out(self._line)
            raise NodeRefused(self.name, f"worker {self._who} is not used any more: its key was revoked")
        changes = list(islice(self._line.monitor.changes(), _MOST_CHANGES))
        for _, message in self._channel.receive_batch():
            self._take(message)  # a message sent before the connection ended may contain the reason
        for connected in changes:
            self._connection(connected)
        if self.feeder:
            self._feed(self.feeder)

    def _lock_out(self, line: Line) -> None:
        """Block the worker's messages on all planes, including the collective plane, which another thread reads."""
        self.connected = False
        ports = (self.hello.collective_port, self.hello.weights_port) if self.hello else ()
        drop_incoming(line.monitor.address, (self._port, *ports))

    def _sent(self, frames: list[Buffer]) -> bool:
        try:
            if self._channel:
                self._channel.send_frames(frames)
        except UnreachableError:
            return False
        return self._channel is not None

    @property
    def _who(self) -> str:
        return with_address(self.name, self.address)

    def _connection(self, connected: bool) -> None:
        self.connected = connected
        if connected and not self.hello:
            self._joined_at = since_boot()
            self.send(Join(__version__, self._session, self._master))
        elif not connected and self.hello:
            raise self.lost("it closed the connection")

    def _take(self, message: object) -> None:
        if isinstance(message, WrongProtocolError):
            raise self._of_another_protocol(message)
        if getattr(message, "session", self._session) != self._session:
            self.dropped += 1
            return
        now = since_boot()
        self.heartbeats.hear(now)
        if isinstance(message, Echo):
            self.heartbeats.link.answered(message.number, now)
        elif isinstance(message, Hello) and not self.hello:
            self._meet(message)
        elif isinstance(message, Refuse):
            raise self._refused(message)
        elif isinstance(message, Bye):
            raise self.lost("it was stopped")
        elif isinstance(message, Heartbeat) and message.epoch != self.epoch:
            self.idle = message.phase == "idle"  # of an earlier plan
            self.dropped += 1
        elif getattr(message, "epoch", None) != self.epoch:
            self.dropped += 1
        else:
            self._of_this_epoch(message, now)

    def _of_this_epoch(self, message: object, now: float) -> None:
        if isinstance(message, Heartbeat):
            if message.progress != self.heartbeats.progress or message.phase == "idle":
                self.heartbeats.advanced = now
            self.heartbeats.progress, self.heartbeats.phase = message.progress, message.phase
            self.heartbeats.window, self.heartbeats.step = message.window, message.step
            self.heartbeats.missed = message.missed - 1
            self.idle = message.phase == "idle"
        elif isinstance(message, Ready):
            self.ready = self._usable(message)
        elif isinstance(message, Stats):
            self.stats = message
        elif isinstance(message, MeasuredLink):
            self.link = message
        elif isinstance(message, MeasuredDisk):
            self.disk = message
        elif isinstance(message, Spans):
            self.spans = replace(message, names=tuple(map(plain, message.names)))
        elif isinstance(message, Failure):
            sentence = plain(message.message, SENTENCE_CHARACTERS)
            raise NodeError(plain(message.node) or self.name, f"worker {self._who}: {sentence}")

    def _usable(self, ready: Ready) -> Ready:
        if not ready.pages or not ready.prefill_tokens:
            offer = f"steps of {ready.prefill_tokens} tokens and {ready.pages} pages"
            raise NodeError(self.name, f"worker {self._who} offers {offer}, too little to compute; leave it out")
        return ready

    def _feed(self, feeder: WeightServer) -> None:
        try:
            feeder.serve()
        except WeightsError as error:
            raise NodeError(self.name, f"worker {self._who} {error}") from None

    def _meet(self, hello: Hello) -> None:
        self.hello = hello
        # the name that `tpi keys list` shows comes first
        self.name = self._net.policy.name_of(self.key) or plain(hello.name) or self.address
        self.heartbeats.link.took(since_boot() - self._joined_at)
        weights, monitor = self._net.connect_watched(WEIGHTS, self._host, hello.weights_port, self._identity, self.key)
        self.feeder = WeightServer(Channel(weights, self._net.tap, share=True), monitor, self._session)

    def _of_another_protocol(self, error: WrongProtocolError) -> NodeRefused:
        text = (
            f"worker {self._who} runs {error}, {self._master} runs tpi {__version__} (protocol {protocol():x}); "
            "install the same version on both"
        )
        return NodeRefused(self.name, text)

    def _refused(self, refusal: Refuse) -> NodeRefused:
        if refusal.reason == "version":  # a refusal has the same format in every version, other messages do not
            text = (
                f"worker {self._who} runs tpi {plain(refusal.version)} and could not read a message; install the same "
                "version on both"
            )
        elif refusal.reason == "twice":
            master = plain(refusal.in_use_by)
            text = f"worker {self._who} is given twice to {master}, under two addresses; give each worker once"
            return NodeTwice(self.name, text)
        elif refusal.reason == "revoked":
            mine = refusal.in_use_by == short_key(self._net.policy.identity.public)
            whose = "this machine's key" if mine else f"the key {plain(refusal.in_use_by)} of another one of this run"
            text = (
                f"worker {self._who} has revoked {whose}; to pair the two again run tpi pair there, then tpi pair "
                "HOST CODE on this machine"
            )
        else:
            used = f"worker {self._who} is in use by {plain(refusal.in_use_by)}; wait for it, or use another worker"
            return NodeInUse(self.name, used)
        return NodeRefused(self.name, text)
