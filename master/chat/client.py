"""Asks a server that runs, `tpi serve` or any other with OpenAI's chat completions. Nothing that it says is trusted."""

import json
import socket
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import SplitResult, urlsplit

from tpi.errors import NodeError, NodeLost, UsageError
from tpi.system.threads.stoppable import stoppable
from tpi.text import SENTENCE_CHARACTERS, plain

_TIMEOUT_S = 630.0  # a little longer than servers take by themselves
_CONNECT_S = 10.0
_MEET_S = 30.0  # until it says which models it has, for which it computes nothing
_UNKNOWN_CONTEXT = 1 << 24
_DATA, _DONE = b"data: ", b"data: [DONE]"
_MOST_BYTES = 4 << 20  # of what is no stream
_WRONG = (ValueError, TypeError, LookupError, AttributeError)  # what another form than OpenAI's comes to


class ChatServer:
    """Asks a server; every call is a connection of its own."""

    def __init__(self, url: str, key: str | None) -> None:
        """Raises UsageError if `url` is none."""
        self._url, self._port = _parts(url)
        self.name = plain(self._url.netloc.rpartition("@")[2])
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def model(self) -> tuple[str, int]:
        """The first model that it has, and its context. Errors as `events`."""
        with closing(self._connect(_MEET_S)) as connection:
            answer = self._ask(connection, "GET", "/v1/models", None)
            with closing(answer), self.understood():
                card = json.loads(self._whole(answer))["data"][0]
                return str(card["id"]), int(card.get("max_model_len") or _UNKNOWN_CONTEXT)

    def events(
        self, body: dict[str, Any], stopped: Callable[[], bool] = lambda: False
    ) -> Generator[dict[str, Any], None, None]:
        """The chunks of a streamed chat completion; leaving early gives the answer up.

        They end where `stopped` says so, however long the server lets one wait.

        Raises:
            NodeLost: if the server cannot be reached, or is gone.
            UsageError: if it refuses what is asked; its `code` is the server's.
        """
        asked = json.dumps(body | {"stream": True})
        with closing(self._connect()) as connection:
            give_up = partial(_hang_up, connection.sock)
            yield from stoppable(partial(self._chunks, connection, asked), give_up, stopped)

    def _chunks(self, connection: HTTPConnection, asked: str) -> Iterator[dict[str, Any]]:
        over = False
        with closing(self._ask(connection, "POST", "/v1/chat/completions", asked)) as response:
            for line in self._lines(response):
                over = over or line == _DONE
                if line.startswith(_DATA) and line != _DONE:
                    yield (chunk := self._chunk(line.removeprefix(_DATA)))
                    over = over or _ends(chunk)
        if not over:
            raise self._lost("it broke off within an answer")

    def _chunk(self, line: bytes) -> dict[str, Any]:
        with self.understood():
            chunk: dict[str, Any] = json.loads(line)
            said = chunk["error"]["message"] if "error" in chunk else None
        if said is not None:
            raise NodeError(self.name, f"{self.name}: {plain(str(said), SENTENCE_CHARACTERS)}")
        return chunk

    @contextmanager
    def understood(self) -> Iterator[None]:
        """Around reading what it says: NodeError where that is of another form."""
        try:
            yield
        except _WRONG as error:
            said = f"what answers at {self.name} is no server of OpenAI's form; look at --url"
            raise NodeError(self.name, said) from error

    def _connect(self, patience_s: float = _TIMEOUT_S) -> HTTPConnection:
        """A connection on which an answer is waited for so long."""
        kind = HTTPSConnection if self._url.scheme == "https" else HTTPConnection
        connection = kind(str(self._url.hostname), self._port, timeout=_CONNECT_S)
        try:
            connection.connect()
        except (OSError, UnicodeError) as error:  # the latter of names that have empty labels
            said = f"no server answers at {self.name} ({error}); start one with: tpi serve -m MODEL"
            raise NodeLost(self.name, said) from error
        if isinstance(connection.sock, socket.socket):
            connection.sock.settimeout(patience_s)
        return connection

    def _ask(self, connection: HTTPConnection, method: str, path: str, body: str | None) -> HTTPResponse:
        try:
            connection.request(method, self._url.path.rstrip("/").removesuffix("/v1") + path, body, self._headers)
            response = connection.getresponse()
            if response.status >= 400:
                with closing(response):
                    raise self._refused(response.status, response.read(_MOST_BYTES))
        except (OSError, HTTPException) as error:
            raise self._lost(error) from error
        return response

    def _whole(self, response: HTTPResponse) -> bytes:
        try:
            return response.read(_MOST_BYTES)
        except (OSError, HTTPException) as error:
            raise self._lost(error) from error

    def _lines(self, response: HTTPResponse) -> Iterator[bytes]:
        try:
            for line in response:
                yield line.strip()
        except (OSError, HTTPException) as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception | str) -> NodeLost:
        return NodeLost(self.name, f"{self.name} does not answer any more ({error}); look at the server's log")

    def _refused(self, status: int, body: bytes) -> "ServerRefusedError | NodeError":
        try:
            error = json.loads(body)["error"]
            said, code = plain(str(error["message"]), SENTENCE_CHARACTERS), error.get("code")
        except _WRONG:
            said, code = f"it answers {status}", None
        if status >= 500:
            return NodeError(self.name, f"{self.name}: {said}")
        return ServerRefusedError(f"{self.name}: {said}", code)


def _ends(chunk: dict[str, Any]) -> bool:
    """Whether a chunk says why the answer is over; who reads it finds out whether it has the form of one."""
    choices = chunk.get("choices")
    return isinstance(choices, list) and any(isinstance(one, dict) and one.get("finish_reason") for one in choices)


def _hang_up(connection: socket.socket) -> None:
    """End a connection, and the read that waits for it."""
    with suppress(OSError):  # it has ended
        connection.shutdown(socket.SHUT_RDWR)


def _parts(url: str) -> tuple[SplitResult, int | None]:
    """An address in its parts, and the port if it names one; UsageError if it is none."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme in ("http", "https") and parts.hostname:
            return parts, parts.port
    except ValueError:  # a port that is none, or brackets that do not close
        pass
    raise UsageError(f"--url {url} is no address of a server; write for example http://127.0.0.1:8080")


class ServerRefusedError(UsageError):
    """A server does not answer what was asked; `code` is its word for the reason."""

    def __init__(self, message: str, code: str | None) -> None:
        super().__init__(message)
        self.code = code
