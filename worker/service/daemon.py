"""The process of a worker: three bound sockets, the I/O loop of the control plane, and the compute thread.

The I/O loop never computes, and the compute thread never touches the control socket. So heartbeats are sent while a
step runs. They carry the compute thread's progress, so that a hung computation shows. A worker serves one master at a
time.
"""

import logging
import os
import select
import signal
import socket
import time
from collections import deque
from contextlib import suppress
from dataclasses import astuple, replace
from types import FrameType

import zmq

from allreduce.base import Endpoints
from tpi import __version__
from tpi.errors import MessageError, PlanError, TpiError, UsageError
from tpi.keys.text import short_key
from tpi.net.channel import Channel, UnreachableError
from tpi.net.codec import WrongProtocolError
from tpi.net.fields import WindowState
from tpi.net.messages import (
    Abort,
    Alive,
    Assign,
    Bye,
    Failure,
    Heartbeat,
    Hello,
    Join,
    Refuse,
    Step,
    master_identity,
)
from tpi.net.monitor import Arrivals
from tpi.net.questions import AskDisk, AskLink, AskSpans, AskStats, Condition, Echo, Inquiry
from tpi.net.sockets import COLLECTIVE, CONTROL, WEIGHTS, Net
from tpi.system.clocks import since_boot
from tpi.text import SENTENCE_CHARACTERS, plain
from worker.profile import limit_options
from worker.service.announce import Announcer
from worker.service.compute import IDLE, Check, Compute
from worker.service.gate import ConnectionLimit
from worker.service.inquiries import Inquiries
from worker.service.lease import Lease
from worker.service.options import Ports, ServedMaster, WorkerOptions
from worker.service.served import Build
from worker.service.spans import pack_spans
from worker.shards.cache import ShardCache
from worker.shards.fetch import Fetcher
from worker.shards.nearby import NearbyPacks

HEARTBEAT_S = 0.25
_MOST_OUTGOING = 256  # limit of the messages that wait for a master to read them
_STOP_S = 5.0  # for the compute thread to end; while it waits, it checks ten times a second
_LAST_WORDS_S = 0.02  # for ZeroMQ's I/O thread to send the last message
_REASON_S = 0.3  # for a master to read why it is locked out, before its connection is closed
log = logging.getLogger(__name__)


class Daemon:
    """One worker. `run` serves masters until a signal arrives, or, with `attached`, until stdin closes."""

    def __init__(self, options: WorkerOptions, build: Build, check: Check) -> None:
        """Bind the sockets and open the cache.

        `check` raises an error for a plan that is invalid; `build` builds the node of a valid plan.

        Raises:
            UsageError: if a port is in use.
            WeightsError: if the cache cannot be used.
        """
        self.options = options
        nearby = NearbyPacks(options.model_dir) if options.model_dir else None
        self._cache = ShardCache(options.cache, options.cache_limit, nearby)
        self._net = Net(policy=options.key_policy)
        self._stopping = False
        self._master: ServedMaster | None = None
        self._outbox: deque[object] = deque()
        self._wakeups, self._waker = socket.socketpair()
        for end in (self._wakeups, self._waker):
            end.setblocking(False)
        control, weights = self._bind()
        self._control = Channel(control, admits=self._net.policy.admits)
        self._control.may_send_long = lambda peer: self._master is not None and peer == self._master.identity
        self._lease = Lease()
        guarded = self._net.policy.guards(options.host)
        arrivals = [Arrivals(one) for one in (control, self._collective, weights)] if guarded else []
        self._gate = ConnectionLimit((self.ports.control, self.ports.collective, self.ports.weights), arrivals)
        self._inquiries = Inquiries(self._wake)
        self._beats = self._dropped = 0
        self._weights = Channel(weights, admits=self._net.policy.admits)
        endpoints = Endpoints(self._net, self._collective)
        self._compute = Compute(self._cache, Fetcher(self._weights), endpoints, build, self._post, check)
        self._compute.dropped = self._all_dropped

    def run(self) -> None:
        """Serve masters, one after the other, until a signal ends the worker."""
        self._catch_signals()
        self._compute.start()
        self._announcer = self._announced()
        poller = zmq.Poller()
        poller.register(self._control.socket, zmq.POLLIN)
        poller.register(self._wakeups.fileno(), zmq.POLLIN)
        for one in self._gate.arrivals:
            poller.register(one.events, zmq.POLLIN)
        if self.options.attached:
            poller.register(0, zmq.POLLIN)
        next_beat = time.monotonic()
        try:
            while not self._stopping:
                events = dict(poller.poll(max(0, int((next_beat - time.monotonic()) * 1000) + 1)))
                if time.monotonic() >= next_beat:  # first, since masters give up workers without heartbeats
                    next_beat = time.monotonic() + HEARTBEAT_S
                    self._keep()
                self._gate.shut_if_crowded()
                self._lock_out()
                self._receive()
                self._drain_outbox()
                if self._compute.broken:
                    raise TpiError(f"worker {self.options.name} stopped: {self._compute.broken}; start it again")
                if 0 in events and not os.read(0, 4096):
                    break
        finally:
            self._shut_down()

    def _announced(self) -> Announcer | None:
        policy, host = self._net.policy, self.options.host
        if not self.options.announce or not policy.guards(host):
            return None
        return Announcer(self.options.name, policy.identity.public, host, self.ports.control)

    def _bind(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        host, port = self.options.host, self.options.port
        if port > 65533:
            raise UsageError(f"a worker needs three ports; give --listen {host}:PORT with a port below 65534")
        try:
            control, number = self._net.bind(CONTROL, host, port)
            self._collective, collective = self._net.bind(COLLECTIVE, host, port and port + 1)
            weights, weights_port = self._net.bind(WEIGHTS, host, port and port + 2)
        except UsageError:
            self._net.close()
            raise
        self.ports = Ports(number, collective, weights_port)
        return control, weights

    def _receive(self) -> None:
        for peer, message in self._control.receive_batch():
            self._handle(peer, message)

    def _handle(self, peer: bytes, message: object) -> None:
        try:
            self._dispatch(peer, message)
        except Exception:  # a message of one peer must not end the service for the others
            log.exception("cannot handle a message of type %s", type(message).__name__)
            self._dropped += 1

    def _all_dropped(self) -> int:
        return self._dropped + self._control.stats.malformed + self._weights.stats.malformed

    def _dispatch(self, peer: bytes, message: object) -> None:
        if isinstance(message, WrongProtocolError):
            self._answer(peer, Refuse(__version__, 0, "version", ""))
        elif isinstance(message, Join):
            self._join(peer, message)
        elif isinstance(message, Inquiry):
            self._begin_inquiry(peer, message)
        elif isinstance(message, Echo):
            self._answer(peer, message)
        elif self._master is not None and self._master.is_sender(peer, self._control.key, message):
            self._heard()
            self._obey(self._master, message)
        else:
            self._dropped += 1

    def _begin_inquiry(self, peer: bytes, asked: Inquiry) -> None:
        options, ports = self.options, self.ports
        master = None if self._lease.may_be_replaced() else self._master  # a silent master does not block others
        used_by, used_s = (master.name, since_boot() - master.since) if master else ("", 0.0)
        profile = options.profile()
        condition = Condition(
            asked.number, __version__, options.name, used_by, used_s, time.time(), ports.collective, ports.weights,
            profile, (),
        )  # fmt: skip
        asker, plan = self._control.sender_address(), self._master.plan if self._master else ()
        if not self._inquiries.begin(peer, asked, condition, asker, plan):
            self._dropped += 1

    def _join(self, peer: bytes, join: Join) -> None:
        if not peer.startswith(master_identity(join.session)):
            self._dropped += 1
            return
        if self._master is not None and (self._master.identity, self._master.key) != (peer, self._control.key):
            self._beat()  # leaves the master if its connection is gone
            if self._moved(join):
                self._leave("it calls over another connection")
            elif self._lease.may_be_replaced():
                self._yield(plain(join.name))
            if self._master is not None:
                twice = self._master.session == join.session
                refusal = Refuse(__version__, join.session, "twice" if twice else "in use", self._master.name)
                self._answer(peer, refusal)
                return
        options, ports = self.options, self.ports
        if self._master is None:
            name = plain(join.name)
            log.info("serving %s", name)
            profile = options.profile()
            self._master = ServedMaster(peer, join.session, name, profile, self._control.key)
            self._compute.master = peer
            self._lease = Lease()
        else:  # the same master joins again, and does not know the plan that is under way
            self._compute.plan = IDLE
            self._compute.put(Abort(self._master.session, self._master.epoch))
        profile = self._master.profile
        hello = Hello(__version__, join.session, options.name, ports.collective, ports.weights, profile)
        self._answer(peer, hello)

    def _moved(self, join: Join) -> bool:
        """Return True if `join` comes from the current master over a new connection, and the old connection is silent.

        This happens if the master's or this machine has moved to another network.
        """
        caller = (join.session, self._control.key)
        return (
            self._master is not None and (self._master.session, self._master.key) == caller and self._lease.is_silent()
        )

    def _obey(self, master: ServedMaster, message: object) -> None:
        if isinstance(message, Bye):
            self._leave("it said goodbye")
        elif isinstance(message, Alive):
            pass  # `_heard` has renewed the lease
        elif isinstance(message, Assign) and message.epoch > master.epoch:
            master.epoch = message.epoch
            self._gate.expected = 2 + message.size
            master.plan = frozenset(one.address.removeprefix("tcp://") for one in message.peers)
            master.node_keys = self._net.policy.guests = frozenset(peer.key for peer in message.peers if peer.key)
            self._compute.plan = (master.session, message.epoch)
            self._compute.put(replace(message, options=limit_options(message.options, master.profile)))
        elif isinstance(message, Abort) and message.epoch == master.epoch:
            self._compute.plan = IDLE
            self._compute.put(message)
        elif isinstance(message, AskDisk | AskLink) and message.epoch == master.epoch:
            if isinstance(message, AskLink):
                self._net.policy.guests = master.node_keys | {peer.key for peer in message.peers if peer.key}
            self._compute.plan = (master.session, message.epoch)
            self._queue(master, message)
        elif isinstance(message, Step | AskStats) and message.epoch == master.epoch:
            self._queue(master, message)
        elif isinstance(message, AskSpans) and message.epoch == master.epoch:
            self._outbox.append(pack_spans(message, self._compute.trace))
        else:
            self._dropped += 1

    def _keep(self) -> None:
        """Send the master a heartbeat, less often while it is silent; leave a master that was silent for a day."""
        self._beats += 1
        self._gate.update()
        if self._lease.has_expired():
            self._leave("it was silent for a day")
        if self._beats % self._lease.heartbeat_divisor() == 0:
            self._beat()

    def _lock_out(self) -> None:
        """Close the connections of revoked keys, and leave the master if its key or one of its nodes' was revoked."""
        policy = self._net.policy
        keys = (self._master.key, *self._master.node_keys) if self._master else ()
        if self._master and (gone := next((key for key in keys if policy.any_refused({key})), b"")):
            self._answer(self._master.identity, Refuse(__version__, self._master.session, "revoked", short_key(gone)))
            self._leave("a key was revoked")
            select.select([], [], [], _REASON_S)
        self._net.disconnect_refused()

    def _heard(self) -> None:
        waited = self._lease.heartbeat_divisor() > 1
        self._lease.renew()
        if waited:  # the master is back, and needs a heartbeat at once
            self._beat()

    def _yield(self, other: str) -> None:
        """Leave the silent master for the master named `other`, and tell the silent one the reason."""
        if self._master is not None:
            self._answer(self._master.identity, Refuse(__version__, self._master.session, "in use", other))
        self._leave("it is silent, and another master calls")

    def _queue(self, master: ServedMaster, message: Step | AskLink | AskDisk | AskStats) -> None:
        try:
            self._compute.put(message)
        except PlanError as error:
            self._compute.plan = IDLE
            self._compute.put(Abort(master.session, master.epoch))
            self._answer(master.identity, Failure(master.session, master.epoch, "", str(error)))

    def _beat(self) -> None:
        if self._master is None:
            return
        compute, master = self._compute, self._master
        window = WindowState(*astuple(compute.position))
        beat = Heartbeat(
            master.session, master.epoch, compute.progress, compute.phase, compute.step, window, compute.missed
        )
        if not self._answer(master.identity, beat):
            self._leave("its connection is gone")

    def _leave(self, reason: str) -> None:
        if self._master is None:
            return
        log.info("%s left: %s", self._master.name, reason)
        master, self._master = self._master, None
        self._net.policy.guests = frozenset()
        self._gate.expected = 0
        self._compute.plan = IDLE
        self._compute.put(Abort(master.session, master.epoch))

    def _answer(self, peer: bytes, message: object) -> bool:
        """Send a message to `peer`, or drop it if the queue is full; return False if the connection is gone."""
        try:
            self._control.offer(message, peer)
        except UnreachableError:
            return False
        except MessageError as error:
            return self._answer(peer, _in_place_of(message, error))
        return True

    def _post(self, message: object) -> None:
        """Queue `message` for the master of its plan; called by the compute thread."""
        self._outbox.append(message)
        self._wake()

    def _drain_outbox(self) -> None:
        with suppress(BlockingIOError):
            while self._wakeups.recv(4096):
                pass
        for peer, condition in self._inquiries.answers():
            self._answer(peer, condition)
        while self._outbox and self._delivered(self._outbox[0]):
            self._outbox.popleft()

    def _delivered(self, message: object) -> bool:
        """Send a message of the compute thread; return False if it must be tried again.

        Return True if the message was sent or dropped. It is dropped if its plan has ended, if the master's connection
        is gone, or if too many messages wait.
        """
        master = self._master
        plan = (getattr(message, "session", 0), getattr(message, "epoch", 0))
        if master is None or plan != (master.session, master.epoch):
            return True
        try:
            return self._control.offer(message, master.identity) or len(self._outbox) > _MOST_OUTGOING
        except UnreachableError:
            return True
        except MessageError as error:
            self._outbox.append(_in_place_of(message, error))
            return True

    def _wake(self) -> None:
        with suppress(OSError):  # the buffer is full, so the loop wakes up anyway, or the socket is closed
            self._waker.send(b"!")

    def _catch_signals(self) -> None:
        def stop(number: int, frame: FrameType | None) -> None:
            self._stopping = True
            self._wake()

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)

    def _shut_down(self) -> None:
        if self._master is not None:
            self._answer(self._master.identity, Bye(self._master.session))
            select.select([], [], [], _LAST_WORDS_S)  # LINGER is 0
        if not self._compute.stop(_STOP_S):
            log.error("the computation of worker %s did not stop; the process exits without it", self.options.name)
            os._exit(1)  # the thread is stuck in a kernel or a system call
        if self._announcer is not None:
            self._announcer.close()
        self._inquiries.close()
        self._cache.close()
        self._gate.close()
        self._net.close()
        self._wakeups.close()
        self._waker.close()


def _in_place_of(message: object, error: MessageError) -> object:
    """Return a message that tells the master why `message` could not be encoded."""
    log.error("a message cannot be sent: %s", error)
    reason = plain(f"its {type(message).__name__} cannot be sent: {error}", SENTENCE_CHARACTERS)
    session, epoch = (getattr(message, name, None) for name in ("session", "epoch"))
    return Bye(session or 0) if session is None or epoch is None else Failure(session, epoch, "", reason)
