"""A wire tap: it forwards a TCP connection, and records the bytes of the connecting side."""

import socket
from contextlib import suppress
from threading import Thread
from types import TracebackType


class Recorder:
    """A listener on `port` that forwards one connection to another port of this machine."""

    def __init__(self, target: int) -> None:
        self.sent = b""
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = Thread(target=self._pass_on)

    def __enter__(self) -> "Recorder":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        self._thread.join()

    def _pass_on(self) -> None:
        near, _ = self._listener.accept()
        with near, socket.create_connection(("127.0.0.1", self._target)) as far:
            back = Thread(target=_copy, args=(far, near))
            back.start()
            with suppress(OSError):
                while data := near.recv(65536):
                    self.sent += data
                    far.sendall(data)
            far.shutdown(socket.SHUT_RDWR)
            back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
