"""A ZAP handler (ZeroMQ RFC 27): it decides for libzmq whether a connection with a given key is accepted.

It is a thread with a REP socket at a fixed in-process address. libzmq's I/O thread asks it after a connection has
proved that it owns its key, and before any of its messages is delivered. The ZAP domain is the plane's name.
"""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Thread

import zmq

from tpi.keys.knownpeers import KnownPeers, caller
from tpi.net.monitor import Socket

_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
log = logging.getLogger(__name__)

Admits = Callable[[bytes, str], bool]
"""Returns True if the owner of a key (32 bytes) may connect to the plane with the given name."""


class ZapHandler:
    """The ZAP handler of one context.

    Create it before the first socket that needs keys is bound; close it after the last such socket is closed.
    """

    def __init__(self, context: "zmq.Context[Socket]", admits: Admits) -> None:
        """Start the handler's thread, which calls `admits` for each connection."""
        self.refused = 0
        self._last_reason = ""
        self.callers = KnownPeers()
        self._admits = admits
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(_ENDPOINT)
        self._woken, self._waker = os.pipe()
        self._thread = Thread(target=self._loop, name="zap", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and wait for its end."""
        os.write(self._waker, b"!")
        self._thread.join()
        self._socket.close(0)
        os.close(self._woken)
        os.close(self._waker)

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        while self._woken not in dict(poller.poll()):
            with suppress(zmq.Again):
                while True:
                    self._socket.send_multipart(self._reply(self._socket.recv_multipart(zmq.NOBLOCK)))

    def _reply(self, request: Sequence[bytes]) -> list[bytes]:
        version, number, domain, address, *_ = *request, b"", b"", b"", b""
        key = request[6] if len(request) == 7 and request[5] == b"CURVE" else b""
        plane, where = (part.decode("ascii", "replace") for part in (domain, address))
        try:
            if version == _VERSION and len(key) == 32 and self._let_in(key, plane, where):
                return [_VERSION, number, b"200", b"OK", key.hex().encode(), b""]
        except Exception as error:  # noqa: BLE001 - if this thread ended, all later connections would be refused
            return [_VERSION, number, b"500", self._unable(error), b"", b""]
        self.refused += 1
        return [_VERSION, number, b"400", b"this key is not paired with this machine", b"", b""]

    def _unable(self, error: Exception) -> bytes:
        """Log why all connections are refused, once for each reason, and return the status text for libzmq."""
        self.refused += 1
        if self._last_reason != str(error):
            self._last_reason = str(error)
            log.warning("connections from other machines are refused: %s", error or type(error).__name__)
        return b"the keys of this machine cannot be read"

    def _let_in(self, key: bytes, plane: str, where: str) -> bool:
        """Return True if the owner of `key` may connect to `plane` from the address `where`.

        The key is recorded before it is looked up, so that `KnownPeers.dismiss` finds a key that is revoked in between.
        """
        place = (plane, caller(where))
        new = self.callers.come(place, key)
        admitted = self._admits(key, plane)
        if new and not admitted:
            self.callers.leave(place, key)
        return admitted
