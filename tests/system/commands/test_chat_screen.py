"""The terminal of a chat during an answer: wrapped words, no typed keys, no control sequences."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from tests.support.chat import MODELS
from tests.support.commands import TPI, clean
from tests.support.terminal import CTRL_C, CTRL_D, ENTER, Terminal, terminal

FIRST = "The quick brown fox jumps over the lazy dog while thirteen wizards "
CODE = "a line of code that is longer than the terminal is wide"
REST = f"juggle twelve bright quartz \x1b]0;owned\x07vials of the darkest liquid.\n\n```\n{CODE}\n```\n"


class SlowServer:
    """A server with OpenAI's API that sends `FIRST`, and `REST` once a test lets it."""

    def __init__(self) -> None:
        self.on = Event()
        self.asked: list[str] = []
        told = self

        class Answers(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._head("application/json")
                self.wfile.write(MODELS)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                told.asked.append(body["messages"][-1]["content"])
                self._head("text/event-stream")
                try:
                    for at in range(0, len(FIRST), 3):
                        self._say({"content": FIRST[at : at + 3]}, None)
                    told.on.wait()
                    self._say({"content": REST}, None)
                    self._say({}, "stop")
                except OSError:
                    pass  # the client stopped the answer

            def _say(self, delta: dict[str, Any], reason: str | None) -> None:
                chunk = {"choices": [{"delta": delta, "finish_reason": reason}]}
                self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())

            def _head(self, kind: str) -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Connection", "close")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Answers)


@contextmanager
def chatting(cache: Path, *flags: str, term: str = "xterm", columns: int = 30) -> Iterator[tuple[Terminal, SlowServer]]:
    server = SlowServer()
    thread = Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    url = f"http://127.0.0.1:{server.http.server_address[1]}"
    try:
        command = [*TPI, "chat", "--url", url, "--no-history", *flags]
        with terminal(command, clean(cache, {"TERM": term}), (24, columns)) as screen:
            screen.expect("\n>")
            yield screen, server
    finally:
        server.on.set()
        server.http.shutdown()
        thread.join()
        server.http.server_close()


@pytest.mark.parametrize("flags", [(), ("--no-markdown",)])
def test_words_wrap_where_the_edge_is_now_and_code_does_not(flags: tuple[str, ...], tmp_path: Path) -> None:
    with chatting(tmp_path, *flags) as (screen, server):
        screen.type("Hi" + ENTER)
        screen.expect("wizards")
        screen.resize(24, 50)
        server.on.set()
        screen.expect("[")
        status = screen.expect("]")
        text = screen.screen
    assert "The quick brown fox jumps over\nthe lazy dog while thirteen" in text
    assert "wizards juggle twelve bright quartz ]0;ownedvials\nof the" in text
    assert CODE in text
    assert max(map(len, status.split("\n"))) <= 50
    assert b"\x1b]0" not in screen.raw
    assert b"\x07" not in screen.raw


@pytest.mark.parametrize("stop", [False, True])
def test_what_is_typed_during_an_answer_waits_for_the_prompt(stop: bool, tmp_path: Path) -> None:
    with chatting(tmp_path, columns=80) as (screen, server):
        screen.type("Hi" + ENTER)
        screen.expect("wizards")
        screen.type("typed ahead")
        if stop:
            screen.type(CTRL_C)
        else:
            server.on.set()
        answer = screen.expect("\n>")
        assert "typed" not in answer
        screen.expect("typed ahead")
        screen.type(ENTER)
        server.on.set()
        screen.expect("\n>")
        assert server.asked == ["Hi", "typed ahead"]
        screen.type(CTRL_D)
        assert screen.leave() == 0


def test_lines_typed_during_an_answer_are_sent_next(tmp_path: Path) -> None:
    for term in ("xterm", "dumb"):
        with chatting(tmp_path, columns=80, term=term) as (screen, server):
            before = screen.attributes()
            screen.type("Hi" + ENTER)
            screen.expect("wizards")
            screen.type("one" + ENTER + "two" + ENTER)
            server.on.set()
            screen.expect("\n>")
            screen.expect("\n>")
            screen.expect("\n>")
            assert server.asked == ["Hi", "one", "two"]
            screen.type("/bye" + ENTER)
            assert screen.leave() == 0
            assert term == "xterm" or screen.attributes() == before
