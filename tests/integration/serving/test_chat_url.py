"""`tpi chat --url`: a conversation with a server that runs, through a pipe."""

import json
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.support.commands import TPI, clean
from tests.support.serving import KEY, MODEL, Served


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


def test_a_long_conversation_drops_its_oldest_turns(served: Served, tmp_path: Path) -> None:
    long = "Hello you there " * 40
    done = chat(served.url, f"{long}\n{long}\n{long}\n", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "dropped" in done.stderr


@pytest.mark.parametrize(
    ("url", "flags", "says"),
    [
        ("http://127.0.0.1:9", (), "no server answers at 127.0.0.1:9"),
        ("ftp://x", (), "is no address of a server"),
        (None, ("--api-key", "wrong"), "a key is needed"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    url: str | None, flags: tuple[str, ...], says: str, served: Served, tmp_path: Path
) -> None:
    done = chat(url or served.url, "Hello\n", tmp_path, *flags)
    assert done.returncode in (1, 2)
    assert says in done.stderr
    assert "Traceback" not in done.stderr
