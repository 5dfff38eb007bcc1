"""`tpi chat --url` with a server that stands still: the user can stop the answer at every stage."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest

from master.chat import client
from master.chat.client import ChatServer
from master.chat.conversation import Conversation, Turn
from master.chat.loop import Chat
from master.chat.remote import ServerChatBackend
from master.vocabulary.sampler import Sampling
from tests.support.chat import MODELS, ScriptedServer, ShownScreen, conversation_with, reply, server
from tpi.errors import NodeError, NodeLost

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
PIECE = b'data: {"choices": [{"delta": {"content": "Once"}}]}\n\n'


@contextmanager
def frozen(said: bytes) -> Iterator[str]:
    """Yield the address of a server that sends a text to its client, and then nothing until the client leaves."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with listening.accept()[0] as one:
                one.sendall(said)
                while one.recv(1 << 16):
                    pass

        thread = Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join()  # waits for clients that have not left, until the test's time is over


class Known(ChatServer):
    """A server whose model is known already."""

    def model(self) -> tuple[str, int]:
        return "cat", 100


@pytest.mark.parametrize(
    ("said", "shown"), [(b"", ""), (HEAD[:20], ""), (HEAD, ""), (HEAD + PIECE, "Once\n"), (HEAD + PIECE[:20], "")]
)
def test_an_answer_is_stopped_though_nothing_comes(said: bytes, shown: str) -> None:
    looks, screen = count(), ShownScreen()
    with frozen(said) as url:
        talk = ServerChatBackend(Known(url, None), Sampling(), 8, Conversation(None, []), screen)
        result = talk.reply("Hello", lambda: bool(screen.shown) == bool(shown) and next(looks) > 2, lambda _: None)
    assert result.finish_reason == "interrupted"
    assert "".join(screen.shown) == shown
    assert [turn.assistant for turn in talk.conversation.turns] == ([shown.strip()] if shown else [])


def test_what_takes_a_connection_and_says_nothing_is_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_MEET_S", 0.1)
    with frozen(b"") as url, pytest.raises(NodeLost, match=r"does not answer any more \(timed out\)"):
        ServerChatBackend(ChatServer(url, None), Sampling(), 8, Conversation(None, []), ShownScreen())


@pytest.mark.parametrize("end", [b"", b'data: {"choices": [{"delta": {"content": " up'])
def test_an_answer_that_breaks_off_can_be_continued(end: bytes) -> None:
    screen = ShownScreen()
    with server(MODELS, PIECE + end) as url:
        talk = conversation_with(url)
        talk.screen = screen
        with pytest.raises((NodeLost, NodeError)):
            reply(talk)
    assert "".join(screen.shown) == "Once\n"
    assert talk.conversation.unfinished == Turn("Hello", "Once")


@pytest.mark.parametrize(
    "end", [b"data: [DONE]\n\n", b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n']
)
def test_an_answer_is_over_where_the_server_says_so(end: bytes) -> None:
    with server(MODELS, PIECE + end) as url:
        assert reply(conversation_with(url)) == "Once"


def test_a_server_that_is_lost_ends_no_chat_at_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Lines:
        interactive = True
        left: ClassVar = ["one", "two", "^C", "/save " + str(tmp_path / "kept.json"), "/bye"]

        def read(self) -> str:
            if (line := self.left.pop(0)) == "^C":
                raise KeyboardInterrupt
            return line

    with server(MODELS, PIECE + b"data: [DONE]\n\n") as url:
        talk = conversation_with(url)
        reply(talk)
    Chat(talk, Lines(), True, tmp_path / "lost.json").run()
    said = capsys.readouterr().err
    assert said.count("no server answers at") == said.count("The conversation so far is kept") == 2
    assert "1 turn in" in said
    assert not (tmp_path / "lost.json").exists()


def test_an_error_of_the_reader_is_raised_where_it_is_awaited() -> None:
    with frozen(b"HTTP/1.1 nonsense\r\n\r\n") as url:
        talk = ServerChatBackend(Known(url, None), Sampling(), 8, Conversation(None, []), ShownScreen())
        with pytest.raises(NodeLost, match="does not answer any more"):
            talk.reply("Hello", lambda: False, lambda _: None)


def test_context_use_is_that_of_the_turns_that_are_kept() -> None:
    looks = count()
    server = ScriptedServer({"content": "Two"}, {"content": "."})
    conversation = Conversation(None, [Turn("a", "b", used=90), Turn("c", "d", used=95)])
    talk = ServerChatBackend(server, Sampling(), 8, conversation, ShownScreen())
    talk.context = 100
    talk.regenerate(lambda: next(looks) > 0, lambda _: None)
    assert talk.used == 91  # of the first turn, and one that came
    talk.reply("Hello", lambda: False, lambda _: None)
    talk.reply("Hello", lambda: False, lambda _: None)
    assert [turn.used for turn in conversation.turns] == [90, 91, 93, 95]
    for _ in range(5):
        talk.reply("Hello", lambda: False, lambda _: None)
    assert talk.used == 100  # never over it
