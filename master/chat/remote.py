"""A conversation with a model that a server runs, `tpi serve` or any other with OpenAI's chat completions."""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from time import perf_counter
from typing import Any
from urllib.parse import SplitResult, urlsplit

from master.chat.conversation import Conversation, Turn
from master.chat.showing.screen import Screen
from master.chat.talk import Talk
from master.generation.answer import Answer, FinishReason
from master.generation.sampler import Sampling
from tpi.errors import NodeError, NodeLost, UsageError

_TIMEOUT_S = 630.0  # a little longer than servers take by themselves
_CONNECT_S = 10.0
_TOO_LONG = "context_length_exceeded"
_UNKNOWN_CONTEXT = 1 << 24
_REASONS: dict[str | None, FinishReason] = {"stop": "stop", "length": "length"}


class ChatServer:
    """Asks a server; every call is a connection of its own."""

    def __init__(self, url: str, key: str | None) -> None:
        """Raises UsageError if `url` is none."""
        self._url: SplitResult = urlsplit(url if "://" in url else f"http://{url}")
        if self._url.scheme not in ("http", "https") or not self._url.hostname:
            raise UsageError(f"--url {url} is no address of a server; write for example http://127.0.0.1:8080")
        self.name = self._url.netloc
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def model(self) -> tuple[str, int]:
        """The first model that it has, and its context. Errors as `events`."""
        with closing(self._connect()) as connection:
            said = json.loads(self._ask(connection, "GET", "/v1/models", None).read())
            card = said["data"][0]
            return str(card["id"]), int(card.get("max_model_len") or _UNKNOWN_CONTEXT)

    def events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed chat completion; leaving early gives the answer up.

        Raises:
            NodeLost: if the server cannot be reached, or is gone.
            UsageError: if it refuses what is asked; its `code` is the server's.
        """
        with closing(self._connect()) as connection:
            response = self._ask(connection, "POST", "/v1/chat/completions", json.dumps(body | {"stream": True}))
            for line in self._lines(response):
                if line.startswith(b"data: ") and line != b"data: [DONE]":
                    chunk = json.loads(line.removeprefix(b"data: "))
                    if "error" in chunk:
                        raise NodeError(self.name, f"{self.name}: {chunk['error'].get('message')}")
                    yield chunk

    def _connect(self) -> HTTPConnection:
        kind = HTTPSConnection if self._url.scheme == "https" else HTTPConnection
        connection = kind(str(self._url.hostname), self._url.port, timeout=_CONNECT_S)
        try:
            connection.connect()
        except OSError as error:
            said = f"no server answers at {self.name} ({error}); start one with: tpi serve -m MODEL"
            raise NodeLost(self.name, said) from error
        if isinstance(connection.sock, socket.socket):
            connection.sock.settimeout(_TIMEOUT_S)
        return connection

    def _ask(self, connection: HTTPConnection, method: str, path: str, body: str | None) -> HTTPResponse:
        try:
            connection.request(method, self._url.path.rstrip("/").removesuffix("/v1") + path, body, self._headers)
            response = connection.getresponse()
            if response.status >= 400:
                raise self._refused(response.status, response.read())
        except (OSError, HTTPException) as error:
            raise self._lost(error) from error
        return response

    def _lines(self, response: HTTPResponse) -> Iterator[bytes]:
        try:
            for line in response:
                yield line.strip()
        except (OSError, HTTPException) as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> NodeLost:
        return NodeLost(self.name, f"{self.name} does not answer any more ({error}); look at the server's log")

    def _refused(self, status: int, body: bytes) -> "ServerRefusedError | NodeError":
        try:
            error = json.loads(body)["error"]
            said, code = str(error["message"]), error.get("code")
        except (ValueError, KeyError, TypeError):
            said, code = f"it answers {status}", None
        if status >= 500:
            return NodeError(self.name, f"{self.name}: {said}")
        return ServerRefusedError(f"{self.name}: {said}", code)


class ServerRefusedError(UsageError):
    """A server does not answer what was asked; `code` is its word for the reason."""

    def __init__(self, message: str, code: str | None) -> None:
        super().__init__(message)
        self.code = code


class ServerTalk(Talk):
    """A conversation of which the server is sent every turn, and has computed the earlier ones."""

    def __init__(
        self, server: ChatServer, sampling: Sampling, tokens: int, conversation: Conversation, screen: Screen
    ) -> None:
        """`tokens` is the most that an answer may have. Raises NodeLost if the server cannot be reached."""
        self.model, context = server.model()
        super().__init__(conversation, context, screen)
        self._server = server
        self._fields = {
            "model": self.model, "max_tokens": tokens, "temperature": sampling.temperature, "top_k": sampling.top_k,
            "top_p": sampling.top_p, "min_p": sampling.min_p, "repeat_penalty": sampling.repeat_penalty,
            "seed": sampling.seed, "stream_options": {"include_usage": True},
        }  # fmt: skip

    def check_system(self, system: str | None) -> None:
        """The server says so when it is asked."""

    def reply(self, text: str, stopped: Callable[[], bool], warn: Callable[[str], None]) -> Answer:
        """See `Talk`."""
        before = self.conversation.dropped
        while True:
            try:
                result = self._answer(text, stopped)
                break
            except ServerRefusedError as error:
                if error.code != _TOO_LONG or self.conversation.dropped >= len(self.conversation.turns):
                    self.conversation.dropped = before
                    raise
                self.conversation.dropped += 1
        if dropped := self.conversation.dropped - before:
            warn(self.full(dropped, self.context))
        if result.text or result.finish_reason != "interrupted":
            self.conversation.turns.append(Turn(text, result.text))
        return result

    def _answer(self, text: str, stopped: Callable[[], bool]) -> Answer:
        messages = self.conversation.messages(text, self.conversation.dropped)
        result, begun, first = Answer(0, finish_reason="interrupted"), perf_counter(), 0.0
        try:
            for chunk in self._server.events(self._fields | {"messages": messages}):
                if stopped():
                    break
                self._take(chunk, result)
                now = perf_counter()
                first = first or (now if result.text else 0.0)
                result.ttft, result.decode_seconds = (first or now) - begun, now - (first or now)
        finally:
            if not result.prompt_tokens:
                self.used += result.counted
            if result.text:
                self.screen.write("\n")
            self.screen.end()
        return result

    def _take(self, chunk: dict[str, Any], result: Answer) -> None:
        """One chunk of the stream."""
        for choice in chunk.get("choices") or ():
            piece = choice.get("delta", {}).get("content") or ""
            result.text += piece
            result.counted += bool(piece)  # about a token each, until the server says it; who stops early never hears
            self.screen.write(piece)
            if (reason := choice.get("finish_reason")) is not None:
                result.finish_reason = _REASONS.get(reason, "stop")
        if usage := chunk.get("usage"):
            result.prompt_tokens, result.counted = usage["prompt_tokens"], usage["completion_tokens"]
            self.used = result.prompt_tokens + result.counted
