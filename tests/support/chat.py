"""Servers for `tpi chat --url` with answers that a test sets, and a screen that stores the shown text."""

import json
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

from master.chat.client import ChatServer
from master.chat.conversation import Conversation
from master.chat.remote import ServerChatBackend
from master.vocabulary.sampler import Sampling

MODELS = json.dumps({"data": [{"id": "cat"}]}).encode()


@contextmanager
def server(models: bytes, said: bytes = b"", status: int = 200) -> Iterator[str]:
    """Run a server that answers every GET with `models` and every POST with `said`; yield its address."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(models, 200)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._send(said, status)

        def _send(self, body: bytes, code: int) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answers) as http:
        thread = Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_address[1]}"
        finally:
            http.shutdown()
            thread.join()


class ShownScreen:
    """A screen that stores the shown text."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def write(self, text: str) -> None:
        self.shown.append(text)

    def resume(self, text: str) -> None:
        pass

    def end(self) -> None:
        pass


class ScriptedServer(ChatServer):
    """A server that gives the same answer each time; `asked` is the last request."""

    def __init__(self, *deltas: dict[str, Any], reason: str = "stop") -> None:
        super().__init__("http://home", None)
        self._deltas, self._reason = deltas, reason
        self.asked: dict[str, Any] = {}

    def model(self) -> tuple[str, int]:
        return "thinker", 4096

    def events(
        self, body: dict[str, Any], stopped: Callable[[], bool] = lambda: False
    ) -> Generator[dict[str, Any], None, None]:
        self.asked = json.loads(json.dumps(body))
        for delta in self._deltas:
            if stopped():
                return
            yield {"choices": [{"delta": delta, "finish_reason": None}]}
        yield {"choices": [{"delta": {}, "finish_reason": self._reason}]}


def conversation_with(url: str) -> ServerChatBackend:
    """Return a conversation with the server at `url`."""
    return ServerChatBackend(ChatServer(url, None), Sampling(), 8, Conversation(None, []), ShownScreen())


def reply(talk: ServerChatBackend) -> str:
    return talk.reply("Hello", lambda: False, lambda _: None).text
