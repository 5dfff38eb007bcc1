"""The HTTP server: a socket of its own, and an end that lets answers finish."""

import asyncio
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from master.generation.thread import EngineThread
from tpi.errors import UsageError

GRACE_S = 10.0  # for answers under way when the server ends
_LINGER_S = 5  # for the last bytes of those that were ended
_KEEP_ALIVE_S = 75
_MOST_CONNECTIONS = 2048
_DEAD_MS = 60_000  # after which a client that takes nothing is gone
_BACKLOG = 1024


class ApiServer(uvicorn.Server):
    """Serves until SIGINT or SIGTERM; then no more is taken, and answers finish or are ended with a reason."""

    def __init__(self, app: ASGIApp, engine: EngineThread, grace_s: float = GRACE_S) -> None:
        config = uvicorn.Config(
            app, http="h11", ws="none", loop="asyncio", lifespan="off", access_log=False, log_config=None,
            timeout_keep_alive=_KEEP_ALIVE_S, limit_concurrency=_MOST_CONNECTIONS, server_header=False,
            timeout_graceful_shutdown=int(grace_s) + _LINGER_S,
        )  # fmt: skip
        super().__init__(config)
        self._engine, self._grace_s = engine, grace_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, while the engine's requests come to their end."""
        stopping = asyncio.ensure_future(asyncio.to_thread(self._engine.stop, self._grace_s))
        await super().shutdown(sockets)
        await stopping

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but a signal that was served is not raised again: the command ends by itself."""

        def leave(number: int, frame: FrameType | None) -> None:
            self.handle_exit(number, frame)

        if threading.current_thread() is not threading.main_thread():  # which alone hears of signals
            yield
            return
        handlers = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at `host`; port 0: any free one.

    Raises:
        UsageError: if it cannot.
    """
    _allow_files()
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except UnicodeError:  # what Python says of labels that are empty or too long
        raise UsageError(f"--host {host!r} is no name or address; give one of this machine") from None
    except OSError as error:
        said = error.strerror or str(error)
        raise UsageError(f"cannot listen at {host}:{port}: {said}; give another --host or --port") from error
    # accepted sockets have it from here: asyncio sets it only where a socket was made for TCP by name
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_MS)
    return listening


def url_of(listening: socket.socket) -> str:
    """How it is reached."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_own(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def _allow_files() -> None:
    """As many open connections as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 65536)), hard))
