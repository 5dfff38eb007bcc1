"""`tpi chat --url` with other servers, or malicious ones: one sentence each time, and no control sequences."""

import json
import re
from pathlib import Path

import pytest

from master.chat.client import ChatServer
from master.chat.command import chat
from master.chat.loop import say_welcome
from tests.support.chat import MODELS, conversation_with, reply, server
from tpi.errors import NodeError, NodeLost, UsageError

EVIL = "\x1b]0;mine\x07"
NOBODY = "http://127.0.0.1:9"


@pytest.mark.parametrize("url", ["http://x:abc", "http://x:99999", "http://[::1", "http://", "ftp://x"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(UsageError, match="is not an address of a server"):
        ChatServer(url, None)


def test_a_name_that_cannot_be_one_is_not_there() -> None:
    with pytest.raises(NodeLost, match=r"no server answers at 192\.\.168\.1\.7:80"):
        ChatServer("http://192..168.1.7:80", None).model()


def test_what_is_said_of_a_server_has_no_password() -> None:
    assert ChatServer("http://me:secret@home:8080", None).name == "home:8080"


@pytest.mark.parametrize(
    "models", [b"<html>", b"{}", b"[]", b'{"data": []}', b'{"data": [{"id": 5, "max_model_len": "x"}]}']
)
def test_what_has_no_models_is_no_such_server(models: bytes) -> None:
    with server(models) as url, pytest.raises(NodeError, match="does not answer like an OpenAI server; check --url"):
        conversation_with(url)


@pytest.mark.parametrize(
    "chunk",
    [
        "{", "5", "[]", '{"choices": 5}', '{"choices": [{"delta": null}]}', '{"choices": [{"delta": {"content": 5}}]}',
        '{"choices": [], "usage": {"prompt_tokens": "x"}}', '{"error": "no"}',
    ],
)  # fmt: skip
def test_a_stream_of_nonsense_is_no_such_server(chunk: str) -> None:
    with server(MODELS, f"data: {chunk}\n\n".encode()) as url:
        talk = conversation_with(url)
        with pytest.raises(NodeError, match="does not answer like an OpenAI server"):
            reply(talk)
    assert not talk.conversation.turns


def test_terminal_codes_in_a_servers_texts_are_not_obeyed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = json.dumps({"error": {"message": f"no{EVIL}"}}).encode()
    with server(json.dumps({"data": [{"id": f"cat{EVIL}"}]}).encode(), error, status=400) as url:
        talk = conversation_with(url)
        say_welcome(talk.model, ("home",), "a server", talk.context)
        with pytest.raises(UsageError) as refused:
            reply(talk)
    with server(MODELS, b"data: " + error) as url, pytest.raises(NodeError) as failed:
        reply(conversation_with(url))
    shown = capsys.readouterr().err + str(refused.value) + str(failed.value)
    assert shown.count("?]0;mine?") == 3
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--url", NOBODY, "-m", "llama"), "--model has no effect with --url"),
        (("--url", NOBODY, "--gpu-memory", "1GiB"), "--gpu-memory has no effect with --url"),
        (("--api-key", "secret", "-m", "llama"), "--api-key has no effect without --url"),
    ],
)
def test_what_counts_for_nothing_is_refused(flags: tuple[str, ...], says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        chat.main(flags, standalone_mode=False)


def test_what_counts_with_a_server_is_taken(tmp_path: Path) -> None:
    with pytest.raises(NodeLost):
        chat.main(("--url", NOBODY, "--cache", str(tmp_path), "--temp", "0.5", "--api-key", "x"), standalone_mode=False)
