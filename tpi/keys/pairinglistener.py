"""Incoming connections while a machine waits to be paired. A silent connection does not delay the others."""

import select
import socket
import time
from contextlib import suppress

_MOST_SILENT = 64  # connections that have sent nothing yet; the oldest are closed first


class PairingListener:
    """Connections to a listener, handed out one after the other, because a code is good for one guess."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._silent: dict[socket.socket, str] = {}  # connections and their addresses, oldest first
        listener.setblocking(False)

    def next(self, ends: float) -> tuple[socket.socket, str] | None:
        """Return the next connection that has sent data, and its address. The caller must close it.

        Return None if there is none by the time `ends` (seconds of `time.monotonic`).
        """
        while (left := ends - time.monotonic()) > 0:
            ready, _, _ = select.select([self._listener, *self._silent], [], [], left)
            for link in self._silent:
                if link in ready:
                    return link, self._silent.pop(link)
            if ready:
                self._let_in()
        return None

    def close(self) -> None:
        """Close all connections that were not returned."""
        for link in self._silent:
            link.close()
        self._silent.clear()

    def _let_in(self) -> None:
        with suppress(OSError):  # the connection is closed already
            link, address = self._listener.accept()
            self._silent[link] = str(address[0])
        while len(self._silent) > _MOST_SILENT:
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            oldest.close()
