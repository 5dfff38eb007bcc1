"""`tpi chat` in real processes, at real terminals and through pipes."""

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from master.chat.conversation import Conversation
from tests.support.commands import TPI, clean
from tests.support.terminal import ALT_ENTER, CTRL_C, CTRL_D, ENTER, UP, Terminal, terminal
from tpi.config import default_cache
from tpi.pack.library.pull import pull

PROMPT = "\n>"


@contextmanager
def chatting(model: str, cache: Path, *flags: str, term: str = "xterm-256color") -> Iterator[Terminal]:
    command = [*TPI, "chat", "-m", model, "--temp", "0", *flags]
    with terminal(command, clean(cache, {"TERM": term})) as screen:
        screen.expect("Ctrl-D or /bye leaves.")
        screen.expect(PROMPT)
        yield screen


def say(screen: Terminal, *lines: str, until: str) -> str:
    """Type lines as one message; return the text shown up to `until`, after which the prompt appears again."""
    screen.type(ALT_ENTER.join(lines) + ENTER)
    shown = screen.expect(until)
    screen.expect(PROMPT)
    return shown


def test_an_evening(model: str, cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    with chatting(model, cache, "-n", "4", "--local", "1") as screen:
        assert "master, worker-1" in screen.screen
        say(screen, "Hello", until="[4 tokens at ")
        say(screen, "two", "lines", until="cut at -n 4: /continue goes on]")
        say(screen, "/nonsense", until="there is no command /nonsense; /help lists them")
        say(screen, "/system", until="there is no system message")
        say(screen, "/system Be brief.", until="the system message is set")
        say(screen, f"/save {file}", until=f"2 turns in {file}")
        say(screen, "/reset", until="all turns are forgotten; the system message stays")
        say(screen, "/regenerate", until="there is no answer yet")
        say(screen, f"/load {file}", until=f"2 turns from {file}")
        say(screen, "/regenerate", until="[4 tokens at ")
        say(screen, "a\\" + ENTER + "b", until="[4 tokens at ")  # a backslash begins a new line, too
        say(screen, "//etc", until="[4 tokens at ")
        screen.type("half a line" + CTRL_C)
        screen.expect("(Ctrl-D or /bye leaves)")
        screen.expect(PROMPT)
        screen.type(UP)
        screen.expect("//etc")
        screen.type(CTRL_C)
        screen.expect(PROMPT)
        say(screen, f"/save {file}", until="4 turns in")
        screen.type(CTRL_D)
        assert screen.leave() == 0
    messages = json.loads(file.read_text())["messages"]
    assert messages[0] == {"role": "system", "content": "Be brief."}
    assert [message["content"] for message in messages[1::2]] == ["Hello", "two\nlines", "a\nb", "/etc"]
    history = cache / "chat_history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert "+two\n+lines" in history.read_text()


def test_a_terminal_that_can_do_nothing(model: str, cache: Path) -> None:
    with chatting(model, cache, "-n", "4", "--no-history", term="dumb") as screen:
        say(screen, "Hello", until="[4 tokens at ")
        screen.type(CTRL_C)
        screen.expect("(Ctrl-D or /bye leaves)")
        screen.expect(PROMPT)
        say(screen, "caf\\" + ENTER + "e", until="[4 tokens at ")
        screen.type("/bye" + ENTER)
        assert screen.leave() == 0
        assert "\x1b" not in screen.raw.decode()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_terminal_is_left_as_it_was(number: signal.Signals, model: str, cache: Path) -> None:
    with terminal([*TPI, "chat", "-m", model], clean(cache, {"TERM": "xterm"})) as screen:
        before = screen.attributes()
        screen.expect(PROMPT)
        screen.type("half a line")
        screen.expect("half a line")
        assert screen.attributes() != before  # the editor reads single keys
        screen.process.send_signal(number)
        assert screen.leave() == 128 + number
        assert screen.attributes() == before
        assert "Traceback" not in screen.screen


def test_a_terminated_run_leaves_the_terminal_as_it_was(cache: Path) -> None:
    gguf = str(pull("smollm2-135m", default_cache()))
    command = [*TPI, "run", gguf, "Write a very long story about the sea.", "-c", "8192", "--quiet"]
    with terminal(command, clean(cache, {"TERM": "dumb"})) as screen:
        before = screen.attributes()
        screen.expect(" ")  # the first words are there
        assert screen.attributes() != before  # nothing that is typed is shown
        screen.process.send_signal(signal.SIGTERM)
        assert screen.leave() == 128 + signal.SIGTERM
        assert screen.attributes() == before
        assert "Traceback" not in screen.screen


@pytest.mark.timeout(300)
def test_ctrl_c_stops_the_answer_and_not_the_chat(cache: Path, tmp_path: Path) -> None:
    gguf = pull("smollm2-135m", default_cache())
    with chatting(str(gguf), cache, "-n", "8000", "-c", "8192", "--local", "1") as screen:
        screen.type("Write a very long story about the sea, with many chapters." + ENTER)
        screen.expect("chapters.\n")
        screen.expect(" ")  # the first words are there
        screen.type(CTRL_C)
        assert "Traceback" not in screen.expect("stopped: /continue goes on]")
        screen.expect(PROMPT)
        say(screen, "/save " + str(tmp_path / "cut.json"), until="1 turn in")
        screen.type("/continue" + ENTER)
        screen.expect("/continue\n")
        screen.expect(" ")  # more words are there
        screen.type(CTRL_C)
        screen.expect("stopped: /continue goes on]")
        screen.expect(PROMPT)
        say(screen, "/save " + str(tmp_path / "talk.json"), until="1 turn in")  # what there was of the answer stays
        say(screen, "What is the capital of France? Answer in one word.", until=" tok/s")
        screen.type(CTRL_D)
        assert screen.leave() == 0
    cut, longer = (Conversation.load(tmp_path / name).turns[0].assistant for name in ("cut.json", "talk.json"))
    assert len(longer) > len(cut) > 0
    assert longer.startswith(cut.rstrip("\N{REPLACEMENT CHARACTER}"))


@pytest.mark.bare
def test_a_chat_goes_on_without_a_lost_worker(model: str, cache: Path) -> None:
    with chatting(model, cache, "-n", "4", "--local", "1") as screen:
        say(screen, "Hello", until="[4 tokens at ")
        workers = psutil.Process(screen.process.pid).children()
        workers[0].kill()
        screen.type("Are you there?" + ENTER)
        screen.expect("is lost: it closed the connection; going on with master")
        screen.expect("[4 tokens at ")
        screen.expect(PROMPT)
        screen.type(CTRL_D)
        assert screen.leave() == 0


def piped(model: str, cache: Path, data: bytes, *flags: str) -> "subprocess.CompletedProcess[bytes]":
    command = [*TPI, "chat", "-m", model, "--temp", "0", *flags]
    return subprocess.run(command, input=data, capture_output=True, timeout=100, env=clean(cache), check=False)


def test_an_answer_that_was_cut_goes_on_in_its_turn(model: str, cache: Path, tmp_path: Path) -> None:
    """The tokens are those of an answer in one go, with no new header and no broken character; after /load, too."""
    files = [tmp_path / name for name in ("pieces.json", "loaded.json", "whole.json")]
    pieces = f"Hello\n/continue\n/continue\n/save {files[0]}\n/load {files[0]}\n/continue\n/save {files[1]}\n"
    cut = piped(model, cache, pieces.encode(), "-n", "4")
    whole = piped(model, cache, f"Hello\n/save {files[2]}\n".encode(), "-n", "12", "--quiet")
    turns = [Conversation.load(file).turns for file in files]
    assert (cut.returncode, [len(each) for each in turns]) == (0, [1, 1, 1])
    assert turns[0][0].assistant == turns[2][0].assistant
    assert len(turns[1][0].assistant) > len(turns[0][0].assistant)
    assert cut.stderr.count(b"cut at -n 4: /continue goes on]") == 4
    assert b"tpi: the answer is cut at -n 12: /continue goes on" in whole.stderr


@pytest.mark.parametrize(
    ("lines", "flags", "said"),
    [
        (b"/continue\n", (), b"there is no answer yet: there is nothing to continue"),
        (b"Hello\n/continue\n", ("-c", "64"), b"this answer with its question takes 64 tokens"),
    ],
)
def test_what_cannot_be_continued_is_refused(
    lines: bytes, flags: tuple[str, ...], said: bytes, model: str, cache: Path
) -> None:
    done = piped(model, cache, lines, *flags)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr


def test_a_full_context_drops_the_oldest_turns_and_says_so(model: str, cache: Path) -> None:
    lines = [f"message number {number}" for number in range(12)]
    done = piped(model, cache, "\n".join(lines).encode(), "-n", "8", "-c", "128")
    said = done.stderr.decode()
    assert done.returncode == 0, said
    assert said.count(" of 128, ") == len(lines)  # every message is answered
    assert "the context of 128 tokens is full: the oldest " in said
    assert "a larger -c keeps more" in said
    assert "Traceback" not in said


def test_a_pipe_gets_answers_alone(model: str, cache: Path) -> None:
    shown = piped(model, cache, b"one\ntwo\n", "-n", "4")
    quiet = piped(model, cache, b"\none\n/regenerate\n/reset\ntwo\n/bye\nthree\n", "-n", "4", "--quiet")
    assert (shown.returncode, quiet.returncode) == (0, 0)
    assert b"tok/s" in shown.stderr
    assert b"tok/s" not in shown.stdout
    assert len(quiet.stdout.decode().split("\n")) >= 3
    assert b"tok/s" not in quiet.stderr
    assert b"\x1b" not in shown.stderr + shown.stdout + quiet.stderr


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"Hi\ncaf\xe9\n", "what was typed is not UTF-8"),
        (b"/load /nowhere.json\n", "cannot read /nowhere.json: No such file"),
        (b"x" * 2000 + b"\n", "over the context of 256; shorten it"),
    ],
)
def test_what_cannot_be_answered_ends_a_pipe_with_a_sentence(data: bytes, says: str, model: str, cache: Path) -> None:
    done = piped(model, cache, data, "-n", "2")
    assert done.returncode == 2
    assert says in done.stderr.decode()
    assert b"Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_chat_at_a_full_stdout_is_one_sentence(model: str, cache: Path) -> None:
    command = [*TPI, "chat", "-m", model, "-q"]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            command, input=b"Hi\n", stdout=full, stderr=subprocess.PIPE, timeout=100, env=clean(cache), check=False
        )
    assert done.stderr.decode().count("\n") == 1
    assert b"output: No space left on device" in done.stderr
