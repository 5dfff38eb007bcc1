"""A client of a running server, `tpi serve` or any other with OpenAI's chat completions.

Its answers are not trusted.
"""

import json
import socket
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import SplitResult, urlsplit

from tpi.errors import NodeError, NodeLost, UsageError
from tpi.system.threads.stoppable import stoppable
from tpi.text import SENTENCE_CHARACTERS, plain

_TIMEOUT_S = 630.0  # a little more than the usual time limits of servers
_CONNECT_S = 10.0
_MEET_S = 30.0  # seconds to wait for the list of models, which needs no computation
_UNKNOWN_CONTEXT = 1 << 24
_DATA, _DONE = b"data: ", b"data: [DONE]"
_MOST_BYTES = 4 << 20  # limit of an answer that is not a stream
_WRONG = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
)  # errors of reading an answer that is not of OpenAI's form


class ChatServer:
    """A server that answers chat requests; each call opens a connection of its own."""

    def __init__(self, url: str, key: str | None) -> None:
        """Store the address and the key, without connecting.

        Raises:
            UsageError: if `url` is not an address of a server.
        """
        self._url, self._port = _parts(url)
        self.name = plain(self._url.netloc.rpartition("@")[2])
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def model(self) -> tuple[str, int]:
        """Return the name of the server's first model, and its context in tokens. Raise the errors of `events`."""
        with closing(self._connect(_MEET_S)) as connection:
            answer = self._ask(connection, "GET", "/v1/models", None)
            with closing(answer), self.understood():
                card = json.loads(self._whole(answer))["data"][0]
                return str(card["id"]), int(card.get("max_model_len") or _UNKNOWN_CONTEXT)

    def events(
        self, body: dict[str, Any], stopped: Callable[[], bool] = lambda: False
    ) -> Generator[dict[str, Any], None, None]:
        """Yield the chunks of a streamed chat completion; closing the generator cancels the answer.

        The chunks end soon after `stopped` returns True, even if the server sends nothing.

        Raises:
            NodeLost: if the server cannot be reached, or closes the connection.
            NodeError: if the server fails, or its answer is not of OpenAI's form.
            UsageError: if the server refuses the request; its `code` is the server's.
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
            raise self._lost("the connection broke off during an answer")

    def _chunk(self, line: bytes) -> dict[str, Any]:
        with self.understood():
            chunk: dict[str, Any] = json.loads(line)
            said = chunk["error"]["message"] if "error" in chunk else None
        if said is not None:
            raise NodeError(self.name, f"{self.name}: {plain(str(said), SENTENCE_CHARACTERS)}")
        return chunk

    @contextmanager
    def understood(self) -> Iterator[None]:
        """Raise NodeError if reading an answer inside the block shows that it is not of OpenAI's form."""
        try:
            yield
        except _WRONG as error:
            said = f"{self.name} does not answer like an OpenAI server; check --url"
            raise NodeError(self.name, said) from error

    def _connect(self, patience_s: float = _TIMEOUT_S) -> HTTPConnection:
        """Return a connection to the server on which reads may wait up to `patience_s` seconds."""
        kind = HTTPSConnection if self._url.scheme == "https" else HTTPConnection
        connection = kind(str(self._url.hostname), self._port, timeout=_CONNECT_S)
        try:
            connection.connect()
        except (OSError, UnicodeError) as error:  # UnicodeError: a name with empty labels
            reason = (isinstance(error, OSError) and error.strerror) or error
            said = f"no server answers at {self.name} ({reason}); start a server with: tpi serve -m MODEL"
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
        if status == HTTPStatus.UNAUTHORIZED:
            said += "; give the server's key with --api-key, or in TPI_API_KEY"
        if status >= 500:
            return NodeError(self.name, f"{self.name}: {said}")
        return ServerRefusedError(f"{self.name}: {said}", code)


def _ends(chunk: dict[str, Any]) -> bool:
    """Return True if a chunk, which may be any JSON object, has a `finish_reason`."""
    choices = chunk.get("choices")
    return isinstance(choices, list) and any(isinstance(one, dict) and one.get("finish_reason") for one in choices)


def _hang_up(connection: socket.socket) -> None:
    """Shut the connection down, so that a thread that reads from it returns."""
    with suppress(OSError):  # it has already ended
        connection.shutdown(socket.SHUT_RDWR)


def _parts(url: str) -> tuple[SplitResult, int | None]:
    """Return the parts of an address, and its port if it has one.

    Raises:
        UsageError: if `url` is not an address of a server.
    """
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme in ("http", "https") and parts.hostname:
            return parts, parts.port
    except ValueError:  # an invalid port, or an unclosed bracket
        pass
    raise UsageError(f"--url {url} is not an address of a server; write for example http://127.0.0.1:8080")


class ServerRefusedError(UsageError):
    """A request that a server refused; `code` is the server's code for the reason."""

    def __init__(self, message: str, code: str | None) -> None:
        super().__init__(message)
        self.code = code
