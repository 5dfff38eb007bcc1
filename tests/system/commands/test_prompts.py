"""Sources of prompts, outputs of answers, and flags out of range, mostly in real processes."""

import json
import os
import subprocess
from collections.abc import Callable
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from master.deployment.planner import parse_split
from master.text.prompts import MOST_BYTES, read_prompt
from tests.support.commands import TPI, clean, tpi_here
from tests.support.models import TinyModel
from tpi import __version__
from tpi.config import parse_size
from tpi.errors import UsageError


class Stdin(TextIOWrapper):
    """Standard input that holds `data`, as a pipe or as a terminal."""

    def __init__(self, data: bytes, terminal: bool = False) -> None:
        super().__init__(BytesIO(data), encoding="utf-8")
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def test_prompts_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xef\xbb\xbfWhy is\nthe sky blue?\r\n")
    assert read_prompt("Hi ", None) == "Hi "
    assert read_prompt(None, str(file)) == "Why is\nthe sky blue?"
    assert read_prompt(None, str(file), raw=True) == "Why is\nthe sky blue?\r\n"
    for flags in ((None, None), ("-", None), (None, "-")):
        monkeypatch.setattr("sys.stdin", Stdin("piped ñ\n".encode()))
        assert read_prompt(*flags) == "piped ñ"
    monkeypatch.setattr("sys.stdin", Stdin(b"typed\n", terminal=True))
    assert read_prompt("-", None) == "typed"
    monkeypatch.setattr("sys.stdin", Stdin(b" "))
    assert read_prompt(None, None, raw=True) == " "


@pytest.mark.parametrize(
    ("prompt", "file", "data", "says"),
    [
        ("", None, b"", "the prompt is empty"),
        (" \n", None, b"", "the prompt is empty"),
        (None, None, b"\n\n", "the prompt is empty"),
        ("a", "b", b"", "exclude each other"),
        (None, None, b"\xff\xfe", "standard input is not UTF-8 text .byte 0."),
        ("caf\udce9", None, b"", "the prompt is not UTF-8"),
        (None, "/nowhere/prompt.txt", b"", "/nowhere/prompt.txt: No such file"),
        (None, "/", b"", "cannot read the prompt from /: Is a directory"),
        (None, "/dev/zero", b"", f"/dev/zero has more than {MOST_BYTES >> 20} MiB"),
    ],
)
def test_what_is_no_prompt_is_refused(
    prompt: str | None, file: str | None, data: bytes, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", Stdin(data))
    with pytest.raises(UsageError, match=says):
        read_prompt(prompt, file)


def test_no_prompt_on_a_terminal_says_the_ways_to_give_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Stdin(b"", terminal=True))
    with pytest.raises(UsageError, match=r'tpi run MODEL "TEXT".*, with -p TEXT, with -f FILE, or on standard input'):
        read_prompt(None, None)


@pytest.mark.parametrize("text", ["nan,1", "1,inf", "1,-1", "0,0", "1e308,1e308", "1,-0.1", "-inf,1"])
def test_shares_are_finite(text: str) -> None:
    with pytest.raises(UsageError, match="shares are numbers of 0 or more"):
        parse_split(text, 2)


@pytest.mark.parametrize("text", ["1025TiB", "9" * 400, "9" * 400 + "TiB"])
def test_sizes_beyond_reason(text: str) -> None:
    with pytest.raises(UsageError, match="too large"):
        parse_size(text)


def tpi(*arguments: str, cache: Path, data: bytes = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*TPI, *arguments], input=data, capture_output=True, timeout=100, env=clean(cache, environment), check=False
    )


CUT = b"tpi: the answer was cut at -n %d: give a larger -n, or leave -n out\n"
BEYOND: dict[str, tuple[list[str], str]] = {
    "context": (["-c", "99999999999"], "99999999999 is not in the range 1<=x<=16777216"),
    "context of the model": (["-c", "257"], "-c 257 is over the 256 tokens that this model was made for"),
    "memory": (["--memory", "5000TiB"], "'5000TiB' is too large"),
    "no memory": (["--memory", "0"], "--memory 0 leaves a node nothing"),
    "temperature": (["--temp", "inf"], "--temp inf is out of range"),
    "not a temperature": (["--temp", "nan"], "--temp nan is out of range"),
    "seed": (["--seed", "-7"], "--seed -7 is out of range"),
    "trace": (["--trace", "/nowhere/trace.json"], "cannot write the trace to /nowhere/trace.json: No such file"),
    "raw system": (["--raw", "--system", "Be brief."], "give one of them"),
    "split": (["--local", "1", "--split", "nan,1"], "shares are numbers of 0 or more"),
}


@pytest.mark.parametrize("case", BEYOND)
def test_flags_beyond_reason_are_one_sentence(case: str, model: str, cache: Path) -> None:
    flags, says = BEYOND[case]
    done = tpi_here("run", "-m", model, "-p", "Hi", *flags, cache=cache)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_bytes_that_are_not_utf8_on_the_command_line(model: str, cache: Path) -> None:
    command = [*map(os.fsencode, TPI), b"run", b"-m", model.encode(), b"-p", b"caf\xe9"]
    done = subprocess.run(command, capture_output=True, timeout=100, env=clean(cache), check=False)
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"the prompt is not UTF-8" in done.stderr
    assert b"Traceback" not in done.stderr


def test_the_answer_goes_to_stdout_and_all_else_to_stderr(model: str, cache: Path) -> None:
    flags = ("run", "-m", model, "-n", "8", "--temp", "0", "--system", "Be brief.")
    shown = tpi(*flags, "--verbose", cache=cache, data=b"Hello\n", TERM="dumb", NO_COLOR="1", COLUMNS="80")
    plain = tpi(*flags, "-p", "Hello", cache=cache)
    quiet = tpi(*flags, "--quiet", "-p", "Hello", cache=cache)
    fields = json.loads(tpi(*flags, "--json", "-f", "-", cache=cache, data=b"Hello\n").stdout)
    assert shown.stdout == quiet.stdout == (fields["text"] + "\n").encode()
    assert b"tok/s" in shown.stderr
    assert b"heads" in shown.stderr
    assert b"\x1b" not in shown.stderr
    assert max(map(len, shown.stderr.decode().splitlines()[:-2])) <= 80
    assert b"tok/s" in plain.stderr
    assert b"heads" not in plain.stderr  # the table is for several nodes, or on demand
    assert quiet.stderr == CUT % 8
    bare = json.loads(tpi("run", "-m", model, "-n", "1", "--json", "-p", "Hello", cache=cache).stdout)
    assert fields["prompt_tokens"] > bare["prompt_tokens"]  # the system message is in it


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    "flags", [("--version",), ("run", "-n", "8", "-p", "Hi", "--temp", "0"), ("run", "-n", "1", "-p", "a", "--json")]
)
def test_a_full_stdout_is_one_sentence(flags: tuple[str, ...], model: str, cache: Path) -> None:
    command = [*TPI, *flags, *(("-q", "-m", model) if flags[0] == "run" else ())]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=100, env=clean(cache), check=False)
    said = done.stderr.decode()
    assert done.returncode == 1
    assert len(said.splitlines()) == 1, said
    assert "output: No space left on device" in said


def test_a_closed_pipe_ends_quietly(model: str, cache: Path) -> None:
    command = [*TPI, "run", "-m", model, "-n", "100", "-p", "Hi", "--temp", "0", "-q"]
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=100, env=clean(cache), check=False)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_stdout_that_is_closed_from_the_start(model: str, cache: Path) -> None:
    shell = ["sh", "-c", '"$@" >&-', "sh", *TPI, "run", "-m", model, "-n", "2", "-p", "Hi", "--temp", "0", "-q"]
    done = subprocess.run(shell, capture_output=True, timeout=100, env=clean(cache), check=False)
    assert (done.returncode, done.stderr) == (0, CUT % 2)


def test_a_stderr_that_is_closed_from_the_start(model: str, cache: Path) -> None:
    """The answer is cut after two tokens, which is a warning."""
    command = [*TPI, "run", "-m", model, "-n", "2", "-p", "Hi", "--temp", "0"]
    shown = subprocess.run(command, capture_output=True, timeout=100, env=clean(cache), check=False)
    assert shown.stdout
    assert CUT % 2 in shown.stderr
    shell = ["sh", "-c", '"$@" 2>&-', "sh", *command]
    done = subprocess.run(shell, capture_output=True, timeout=100, env=clean(cache), check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, shown.stdout, b"")


def test_characters_that_the_terminal_lacks_end_nothing(model: str, cache: Path) -> None:
    done = tpi("run", "-m", model, "-n", "30", "-p", "Hi", "--temp", "0", "-q", cache=cache, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, CUT % 30)


def test_the_trace_is_opened_before_the_work(cache: Path) -> None:
    done = tpi("run", "-m", "no-such-model", "-p", "Hi", "--trace", "/nowhere/t.json", cache=cache)
    assert b"cannot write the trace" in done.stderr


def test_version_flag(cache: Path) -> None:
    assert tpi("--version", cache=cache).stdout.decode().strip() == __version__


def test_help_states_ranges_and_defaults(cache: Path, tiny_model: Callable[[str], TinyModel]) -> None:
    said = " ".join(tpi("run", "--help-all", cache=cache).stdout.decode().split())
    for flag in ("Temperature, 0 to 100", "else bf16", "above 0 to 1", "default: the free memory", "1<=x<=16777216"):
        assert flag in said
