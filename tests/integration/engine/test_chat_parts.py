"""The parts of a chat: conversations in files, contexts that become full, commands, lines of a pipe."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from master.chat.commands import COMMANDS, help_text
from master.chat.conversation import Conversation, Turn
from master.chat.own import fit
from master.chat.readers import PlainReader
from master.deployment.prefixindex import PrefixIndex
from master.generation.request import Request
from master.text.prompts import MOST_BYTES
from master.text.tokenizer import Message
from master.vocabulary.sampler import Sampler, Sampling
from tests.support.cluster.inprocess import in_process_engine
from tests.support.generating import generate
from tpi.errors import UsageError
from tpi.pack.reader import Pack
from tpi.system.atomic import write_atomically

TALK = Conversation("Be brief.", [Turn("Hello", "Hi!"), Turn("你好\n?", "")])


def test_a_saved_conversation_is_loaded_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    for talk in (TALK, Conversation(), TALK):  # over an older one, too
        talk.save(file)
        assert Conversation.load(file) == talk
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["talk.json"]


BAD = {
    "empty": b"",
    "no json": b"hello",
    "not utf-8": b'{"messages": [{"role": "user", "content": "\xff"}]}',
    "a list": b"[]",
    "no messages": b"{}",
    "a number": b'{"messages": 7}',
    "a half turn": b'{"messages": [{"role": "user", "content": "a"}]}',
    "the wrong order": b'{"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "a"}]}',
    "no text": b'{"messages": [{"role": "user", "content": 1}, {"role": "assistant", "content": "a"}]}',
    "a role of its own": b'{"messages": [{"role": "tool", "content": "a"}, {"role": "assistant", "content": "a"}]}',
    "half a character": b'{"messages": [{"role": "system", "content": "\\ud800"}]}',
    "too deep": b"[" * 100_000,
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_conversation_is_refused_and_not_overwritten(case: str, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    file.write_bytes(BAD[case])
    with pytest.raises(UsageError, match=r"talk\.json is not a saved conversation; name a file that /save has written"):
        Conversation.load(file)
    with pytest.raises(UsageError, match=r"talk\.json exists and is not a saved conversation; give another name"):
        TALK.save(file)
    assert file.read_bytes() == BAD[case]


def test_files_that_cannot_be_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*: No such file"):
        Conversation.load(tmp_path / "none.json")
    with pytest.raises(UsageError, match=r"cannot read .*: Is a directory"):
        Conversation.load(tmp_path)
    with pytest.raises(UsageError, match=r"cannot write .*: No such file"):
        TALK.save(tmp_path / "nowhere" / "talk.json")


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "talk.json"
    TALK.save(file)
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write_atomically(file, b"new")
    assert Conversation.load(file) == TALK
    assert list(tmp_path.iterdir()) == [file]


def words(messages: Sequence[Message]) -> list[int]:
    """Return a token for each letter, and one for each message."""
    return [0] * sum(1 + len(message["content"]) for message in messages)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12),
    st.integers(1, 80),
    st.integers(20, 120),
    st.integers(1, 60),
    st.booleans(),
)
def test_the_oldest_turns_go_and_only_where_they_must(
    sizes: list[tuple[int, int]], user: int, context: int, reserved: int, system: bool
) -> None:
    talk = Conversation("s" * 5 if system else None, [Turn("u" * a, "a" * b) for a, b in sizes])
    whole, said = list(talk.turns), "m" * user
    alone = len(words(Conversation(talk.system).messages(said, 0)))
    try:
        ids = fit(talk, said, words, context, reserved)
    except UsageError:
        assert alone >= context
        assert talk.dropped == 0
        return
    assert talk.turns == whole  # nothing is lost to /save
    assert ids == words(talk.messages(said, talk.dropped))
    assert len(ids) < context
    room = context - min(reserved, max(context // 4, 1))
    if len(words(talk.messages(said, 0))) <= room:
        assert talk.dropped == 0
    elif talk.dropped:
        assert len(words(talk.messages(said, talk.dropped - 1))) > 0.75 * room
    assert fit(talk, said, words, context, reserved) == ids  # and stays so


def read_all(data: bytes) -> list[str]:
    reader, lines = PlainReader(BytesIO(data), interactive=False), []
    while (line := reader.read()) is not None:
        lines.append(line)
    return lines


def test_lines_of_a_pipe() -> None:
    assert read_all(b"one\r\ntwo \\\nand three\n\nlast") == ["one", "two \nand three", "", "last"]
    assert read_all(b"open \\") == ["open "]
    with pytest.raises(UsageError, match="what was typed is not UTF-8"):
        read_all(b"caf\xe9\n")
    with pytest.raises(UsageError, match="a line has more than"):
        read_all(b"x" * (MOST_BYTES + 1))


def test_help_names_every_command() -> None:
    assert list(COMMANDS) == ["/help", "/reset", "/system", "/save", "/load", "/continue", "/regenerate", "/bye"]
    assert all(name in help_text() for name in COMMANDS)
    assert max(map(len, help_text().splitlines())) < 80


def test_an_answer_that_is_stopped_can_be_gone_on_from(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    pack = tiny_pack("llama")
    greedy = Sampler(Sampling(temperature=0))
    prompt, more = list(range(3, 60)), list(range(70, 90))
    with in_process_engine(pack, [1, 1], tmp_path, chunk=16) as engine:
        for when in (0, 1, 2, 4, 5, 9):  # before the prompt, between its chunks, among the tokens of the answer
            first = engine.admit(prompt)
            request = Request(first, greedy, 20, lambda sampled: True)
            engine.submit(request)
            for _ in range(when):
                engine.step()
            engine.withdraw(request)
            assert len(first.tokens) - len(prompt) == max(0, when - 3)
            engine.release(first)
            resumed, fresh = engine.admit(prompt + more, reuse=True), engine.admit(prompt + more)
            again = [sampled.token for sampled in generate(engine, resumed, greedy, 5)]
            assert resumed.cached == max(0, min(len(prompt), 16 * when))
            assert again == [sampled.token for sampled in generate(engine, fresh, greedy, 5)]
            engine.release(resumed)
            engine.release(fresh)
            engine.deployment.pages.contents = PrefixIndex()  # the next one finds nothing


def test_only_a_chat_at_a_terminal_loads_the_editor() -> None:
    code = "import sys, master.commands, master.chat.command; print('prompt_toolkit' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_saved_files_are_plain_json(tmp_path: Path) -> None:
    TALK.save(tmp_path / "talk.json")
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert saved["messages"][0] == {"role": "system", "content": "Be brief."}
