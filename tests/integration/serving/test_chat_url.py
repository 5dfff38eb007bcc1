"""`tpi chat --url`: a conversation with a running server, through a pipe."""

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Event, Thread

import httpx
import pytest

from tests.support.commands import TPI, clean
from tests.support.serving import KEY, MODEL, Served
from tests.support.terminal import CTRL_C, CTRL_D, ENTER, terminal

PIECES = ["# Cats\nThey ar", "e *very* **so", "ft**.\n\n- pu", "rr\n", "```py\nx = 1\n``", "`\n\x1b[2J"]


def chat(url: str, text: str, folder: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    command = [*TPI, "chat", "--url", url, "--temp", "0", "-n", "8", *flags]
    environment = clean(folder, {"TPI_API_KEY": KEY})
    return subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=100, env=environment, check=False
    )


def test_two_turns(served: Served, http: httpx.Client, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    done = chat(served.url, f"Hello\nAnd then?\n/save {file}\n", tmp_path, "--system", "Be brief.")
    assert done.returncode == 0, done.stderr
    assert f"{MODEL} on {served.url.removeprefix('http://')}" in done.stderr
    assert "cut at -n 8" in done.stderr
    said = json.loads(file.read_text())["messages"]
    assert [message["role"] for message in said] == ["system", "user", "assistant", "user", "assistant"]
    body = {"messages": said[:2], "max_tokens": 8, "temperature": 0}
    assert http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"] == said[2]["content"]
    assert done.stdout.split()[: len(said[2]["content"].split())] == said[2]["content"].split()


def test_a_cut_answer_goes_on_in_its_turn(served: Served, tmp_path: Path) -> None:
    cut, longer = tmp_path / "cut.json", tmp_path / "longer.json"
    done = chat(served.url, f"Hello\n/save {cut}\n/continue\n/save {longer}\n", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cut at -n 8: /continue goes on") == 2
    (_, first), (_, second) = (json.loads(file.read_text())["messages"] for file in (cut, longer))
    assert second["content"].startswith(first["content"])
    assert len(second["content"]) > len(first["content"])


def test_a_long_conversation_drops_its_oldest_turns(served: Served, tmp_path: Path) -> None:
    long = "Hello you there " * 40
    done = chat(served.url, f"{long}\n{long}\n{long}\n", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "dropped" in done.stderr


@pytest.mark.parametrize(
    ("url", "flags", "says"),
    [
        ("http://127.0.0.1:9", (), "no server answers at 127.0.0.1:9 (Connection refused); start a server with"),
        ("ftp://x", (), "is not an address of a server"),
        (
            None,
            ("--api-key", "wrong"),
            "started with; give the server's key with --api-key, or in TPI_API_KEY",
        ),
    ],
)
def test_what_is_wrong_is_one_sentence(
    url: str | None, flags: tuple[str, ...], says: str, served: Served, tmp_path: Path
) -> None:
    done = chat(url or served.url, "Hello\n", tmp_path, *flags)
    assert done.returncode in (1, 2)
    assert says in done.stderr
    assert "Traceback" not in done.stderr


class Says(BaseHTTPRequestHandler):
    """A server whose model answers with `PIECES`."""

    def do_GET(self) -> None:
        self._send("application/json", json.dumps({"data": [{"id": "cat"}]}).encode())

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        chunks = [json.dumps({"choices": [{"delta": {"content": piece}}]}) for piece in PIECES]
        body = "".join(f"data: {chunk}\n\n" for chunk in [*chunks, "[DONE]"]).encode()
        if b"for ever" not in asked:
            self._send("text/event-stream", body)
            return
        self.send_response(200)
        self.end_headers()
        pause = Event()
        with suppress(ConnectionError):
            while not pause.wait(0.01):  # until the client leaves; behind full buffers that would not be seen
                self.wfile.write(body.removesuffix(b"data: [DONE]\n\n"))

    def _send(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def cat() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Says) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("term", "flags", "styled"), [("xterm", (), True), ("xterm", ("--no-markdown",), False), ("dumb", (), False)]
)
def test_markdown_at_a_terminal(term: str, flags: tuple[str, ...], styled: bool, cat: str, tmp_path: Path) -> None:
    command = [*TPI, "chat", "--url", cat, "--no-history", *flags]
    with terminal(command, clean(tmp_path, {"TERM": term})) as screen:
        screen.expect("leaves.")
        screen.expect(">")
        screen.type(f"Tell me{ENTER}")
        screen.expect("context")
        screen.expect(">")
        screen.type(CTRL_D)
        assert screen.leave() == 0
    raw = screen.raw.decode()
    assert ("\x1b[1msoft\x1b[0m" in raw) is styled
    assert ("\x1b[36mx = 1\x1b[0m" in raw) is styled
    assert ("**soft**" in raw) is not styled
    assert "They are" in screen.screen
    assert "\x1b[2J" not in raw  # a model does not clear the screen


def test_ctrl_c_stops_the_servers_answer_and_keeps_its_beginning(cat: str, tmp_path: Path) -> None:
    with terminal([*TPI, "chat", "--url", cat, "--no-history"], clean(tmp_path, {"TERM": "xterm"})) as screen:
        screen.expect("leaves.")
        screen.expect(">")
        screen.type(f"Talk for ever{ENTER}")
        screen.expect("purr")
        screen.type(CTRL_C)
        figures = screen.expect("stopped: /continue goes on]").rpartition("[")[2]
        count, rate, used = re.search(r"(\d+) tokens at (\S+) tok/s.*context (\d+) of", figures).groups()  # type: ignore[union-attr]
        assert int(count) == int(used) >= 4
        assert float(rate) > 0
        screen.expect(">")
        screen.type(CTRL_D)
        assert screen.leave() == 0


def test_a_pipe_gets_markdown_as_it_is(cat: str, tmp_path: Path) -> None:
    assert chat(cat, "Tell me\n", tmp_path).stdout == "".join(PIECES) + "\n"
