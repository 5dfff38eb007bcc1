"""The HTTP server: its limits, its signals, and a shutdown that lets answers finish."""

import asyncio
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from master.api.connections import KEEP_ALIVE_S, Connections, most_connections
from master.generation.thread import EngineThread

GRACE_S = 10.0  # seconds for answers in progress at shutdown
_LINGER_S = 5  # seconds for the last bytes of answers that were cut off
_TICKS = 10  # per second, of uvicorn's main loop


class ApiServer(uvicorn.Server):
    """uvicorn's server. After SIGINT or SIGTERM it takes no requests; answers finish, or end with a reason."""

    def __init__(self, app: ASGIApp, engine: EngineThread, grace_s: float = GRACE_S) -> None:
        most = most_connections()
        self._connections = Connections(most)
        config = uvicorn.Config(
            app, http=self._connections.protocol, ws="none", loop="asyncio", lifespan="off", access_log=False,
            log_config=None, timeout_keep_alive=int(KEEP_ALIVE_S), backlog=most // 2, server_header=False,
            timeout_graceful_shutdown=int(grace_s) + _LINGER_S,
        )  # fmt: skip
        super().__init__(config)
        self._engine, self._grace_s = engine, grace_s

    async def on_tick(self, counter: int) -> bool:
        """Run uvicorn's tick; once a second, close the connections that exceeded a time limit."""
        if counter % _TICKS == 0:
            self._connections.sweep(asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down like uvicorn, while the engine finishes its requests."""
        stopping = asyncio.ensure_future(asyncio.to_thread(self._engine.stop, self._grace_s))
        await super().shutdown(sockets)
        await stopping

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals like uvicorn, but do not raise them again at the end, because the command ends by itself."""

        def leave(number: int, frame: FrameType | None) -> None:
            self.handle_exit(number, frame)

        if threading.current_thread() is not threading.main_thread():  # only the main thread can handle signals
            yield
            return
        handlers = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
