"""Who connects while one machine waits for another to pair with: whoever says nothing keeps nobody waiting."""

import select
import socket
import time
from contextlib import suppress

_MOST_SILENT = 64  # connections that have said nothing yet; the oldest go first


class Guests:
    """Connections to a listener, served one after the other: a code is good for one guess."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._silent: dict[socket.socket, str] = {}  # with their addresses, in the order in which they came
        listener.setblocking(False)

    def next(self, ends: float) -> tuple[socket.socket, str] | None:
        """The first who begins to speak, and its address; the caller's from now on. None once it is `ends`.

        `ends` in `time.monotonic` seconds.
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
        """Send away who is left."""
        for link in self._silent:
            link.close()
        self._silent.clear()

    def _let_in(self) -> None:
        with suppress(OSError):  # it has gone again
            link, address = self._listener.accept()
            self._silent[link] = str(address[0])
        while len(self._silent) > _MOST_SILENT:
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            oldest.close()
