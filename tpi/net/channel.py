"""Typed messages over a socket of the control or weights plane. Every wait has a deadline.

Malformed messages are dropped and counted. Messages from a key that is no longer trusted are dropped too.
"""

import errno
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import zmq

from tpi.errors import MessageError
from tpi.net.codec import Buffer, WrongProtocolError, decode, encode
from tpi.net.monitor import Socket, end_connection, peer_address, receive_keyed, receive_whole
from tpi.net.sockets import Tap
from tpi.system.interrupts import deferred

_BATCH_MESSAGES = 64  # messages handled at once before control returns to the caller
_BATCH_S = 0.01  # or for this many seconds
_STRANGER_BYTES = 4096  # longest message that is read from an unknown peer


@dataclass
class ChannelStats:
    """Message and byte counts since the channel was opened."""

    sent: int = 0
    received: int = 0
    malformed: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


class UnreachableError(MessageError):
    """Raised if there is no connection to the receiver, or its queue stayed full."""


class FullError(UnreachableError):
    """Raised if the receiver's queue stayed full. A DEALER without a connection raises it too."""


class Channel:
    """Typed messages over one ROUTER or DEALER socket. Only one thread at a time may use it.

    Received frames are copied: an interrupt that arrives while pyzmq destroys a `zmq.Frame` would be printed and lost.
    """

    def __init__(
        self, socket: Socket, tap: Tap | None = None, share: bool = False, admits: Callable[[bytes], bool] | None = None
    ) -> None:
        """Wrap `socket`.

        `tap` sees the frames of every message (`tpi.net.sockets.Tap`). With `share`, large frames are sent from the
        message's own memory, which must not change afterwards.
        `admits(key)` returns True while the owner of `key` may speak. It is called for each message if the socket needs
        keys.
        """
        self.socket = socket
        self._share = share
        self.stats = ChannelStats()
        self.may_send_long: Callable[[bytes], bool] | None = None
        """Returns True if a peer may send long messages; None means that all may.

        Other peers' messages are read only up to the length of a Join.
        """
        self._router = socket.getsockopt(zmq.TYPE) == zmq.ROUTER
        self._tap = tap
        self._admits = admits if self._router else None
        self._keyed = bool(socket.getsockopt(zmq.CURVE_SERVER))
        self.key = b""
        """Key of the sender of the last message; empty if the socket needs no keys."""
        self._descriptor = -1

    def sender_address(self) -> str:
        """Return the IP address that the last message came from; empty if the connection is gone or none is known."""
        return peer_address(self._descriptor) if self._descriptor >= 0 else ""

    def send(self, message: object, peer: bytes = b"") -> None:
        """Queue a message; `peer` is the receiver's identity, on a ROUTER only.

        Raises:
            UnreachableError: if the peer is gone, or its queue stays full for the plane's send timeout.
        """
        self.send_frames(encode(message), peer)

    def send_frames(self, frames: list[Buffer], peer: bytes = b"") -> None:
        """Queue the frames of a message that was encoded once for several receivers.

        Raises:
            UnreachableError: if the peer is gone, or its queue stays full for the plane's send timeout.
        """
        if self._tap:
            self._tap("sent", frames)
        try:
            self._send([peer, *frames] if self._router else frames)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EAGAIN, errno.EHOSTUNREACH):
                raise
            kind = FullError if error.errno == errno.EAGAIN else UnreachableError
            raise kind(f"no connection: {os.strerror(error.errno)}") from None
        self.stats.sent += 1
        self.stats.sent_bytes += sum(map(len, frames))

    def offer(self, message: object, peer: bytes = b"") -> bool:
        """Queue a message without waiting. Return False if the receiver's queue is full.

        Raises:
            UnreachableError: if the peer is gone (on a ROUTER).
        """
        if not self._router and not int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
            return False
        timeout = self.socket.sndtimeo
        self.socket.sndtimeo = 0
        try:
            self.send(message, peer)
        except FullError:
            return False
        finally:
            self.socket.sndtimeo = timeout
        return True

    def receive(self) -> tuple[bytes, Any] | None:
        """Return the next message with its sender's identity (empty on a DEALER), or None if there is none now.

        Malformed messages are dropped and counted, and so are long messages from unknown peers. A message of another
        protocol is returned as the `WrongProtocolError` itself. None is also returned after many dropped messages in a
        row, so that their sender cannot take all of the caller's time.
        """
        ends = 0.0
        for _ in range(_BATCH_MESSAGES):
            parts = self._receive()
            if parts is None:
                return None
            peer = parts.pop(0) if self._router else b""
            message = self._decoded(parts) if self._admitted(peer, parts) else None
            if message is not None:
                return peer, message
            ends = ends or time.monotonic() + _BATCH_S
            if time.monotonic() > ends:
                return None
        return None

    def receive_batch(self) -> Iterator[tuple[bytes, Any]]:
        """Yield the messages that have arrived, as `receive` returns them.

        The iterator ends after `_BATCH_S` seconds or `_BATCH_MESSAGES` messages, so that the caller can do other work.
        """
        ends = 0.0
        for _ in range(_BATCH_MESSAGES):
            received = self.receive()
            if received is None:
                return
            ends = ends or time.monotonic() + _BATCH_S
            yield received
            if time.monotonic() > ends:
                return

    def wait(self, seconds: float) -> tuple[bytes, Any] | None:
        """Return the next message as `receive` does, waiting up to `seconds` for it."""
        ends = time.monotonic() + seconds
        while (received := self.receive()) is None:
            left = ends - time.monotonic()
            if left <= 0:
                return None
            self.socket.poll(max(1, int(left * 1000)))
        return received

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket. Queued messages have `linger_ms` milliseconds to be sent."""
        self.socket.close(linger_ms)

    def _send(self, frames: list[Buffer]) -> None:
        with deferred():  # after half a message, the receiver would take the next one for its remainder
            self.socket.send_multipart(frames, copy=not self._share)

    def _receive(self) -> list[bytes] | None:
        """Return the frames of the next message, or None if no message has arrived.

        If the sender's key is refused, the result is one empty frame instead.
        """
        if self._admits is None:
            return receive_whole(self.socket)
        received = receive_keyed(self.socket)
        if received is None:
            return None
        frames, self.key, self._descriptor = received
        if not self._keyed or self._admits(self.key):
            return frames
        end_connection(self._descriptor)
        return [b""]

    def _admitted(self, peer: bytes, frames: list[bytes]) -> bool:
        if (
            self.may_send_long is None
            or (len(frames) == 1 and len(frames[0]) <= _STRANGER_BYTES)
            or self.may_send_long(peer)
        ):
            return True
        self.stats.malformed += 1
        return False

    def _decoded(self, frames: list[bytes]) -> Any:
        if self._tap:
            self._tap("received", frames)
        try:
            message = decode(frames)
        except WrongProtocolError as error:
            return error
        except MessageError:
            self.stats.malformed += 1
            return None
        self.stats.received += 1
        self.stats.received_bytes += sum(map(len, frames))
        return message
