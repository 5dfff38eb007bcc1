"""Paths from a user or the environment: what each means, and one sentence for each invalid path."""

import json
import logging
import os
import pwd
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.models import TinyModel
from tests.support.paths import ROOT
from tpi.cli import run_command
from tpi.config import default_cache, default_config
from tpi.errors import UsageError
from tpi.keys.identity import load_identity
from tpi.keys.ring import KeyRing
from tpi.paths import home, user_path
from tpi.topology.schema import load_topology

FAMILIAR = {"HOME": "/home/ada", "TPI_CACHE": "", "TPI_CONFIG": "", "XDG_CACHE_HOME": "", "XDG_CONFIG_HOME": ""}


def no_account(number: object) -> pwd.struct_passwd:
    raise KeyError(number)


def set_all(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in (FAMILIAR | variables).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "cache"),
    [
        ({}, "/home/ada/.cache/tpi"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/tpi"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/ada/.cache/tpi"),
        ({"TPI_CACHE": "/disk", "XDG_CACHE_HOME": "/xdg"}, "/disk"),
        ({"TPI_CACHE": "~/disk"}, "/home/ada/disk"),
    ],
)
def test_cache_is_where_the_environment_says(
    variables: dict[str, str], cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_all(monkeypatch, **variables)
    assert default_cache() == Path(cache)


def test_no_home_is_one_sentence_and_needs_none_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pwd, "getpwuid", no_account)
    for nowhere in ("", "relative"):
        set_all(monkeypatch, HOME=nowhere)
        assert home() is None
        with pytest.raises(UsageError, match=r"no home directory; set TPI_CACHE to a directory"):
            default_cache()
        with pytest.raises(UsageError, match=r"no home directory; set TPI_CONFIG to a directory"):
            default_config()
        with pytest.raises(UsageError, match=r"'~/x' cannot be found: ~ is not a known home"):
            user_path("~/x")
    set_all(monkeypatch, HOME="", TPI_CACHE="/c", XDG_CONFIG_HOME="/d")
    assert (default_cache(), default_config()) == (Path("/c"), Path("/d/tpi"))


def test_home_is_the_accounts_where_the_environment_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, HOME="")
    account = pwd.getpwuid(0)
    monkeypatch.setattr(pwd, "getpwuid", lambda number: account)
    assert home() == Path(account.pw_dir)
    assert user_path(f"~{account.pw_name}/x") == Path(account.pw_dir, "x")


@pytest.mark.parametrize("text", ["", "a\0b", "caf\udce9", "~no-such-user/x"])
def test_text_that_cannot_be_a_path_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"; (name|rename|give) "):
        user_path(text)


def test_a_name_with_a_tilde_is_a_file_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("~backup~").touch()
    assert user_path("~backup~") == Path("~backup~")


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with one of each kind of thing that a path may name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TPI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TPI_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(logging, "basicConfig", lambda **options: None)  # `tpi worker` sets up the whole process's
    Path("file").write_bytes(b"\xff\xfe")
    Path("full").mkdir()
    Path("full", "file").touch()
    os.mkfifo("fifo")
    Path("dangling").symlink_to("nowhere")
    Path("loop").symlink_to("loop")
    return tmp_path


ODD = ("", "file", "full", "file/x", "dangling/x", "loop", "n" * 300, "~no-such-user/x", "caf\udce9", "/proc/x")
COMMANDS: dict[str, tuple[str, ...]] = {  # each, and the odd paths that are right there
    "pack -o out @": (),
    "pack -o @ m.gguf": (),
    "run -p hi -m @": (),
    "run -m m.gguf -f @": (),
    "run -p hi -m m.gguf --trace @": (),
    "plan -m smollm2-135m --cache @": ("full",),
    "chat -m @": (),
    "serve -m @": (),
    "bench -m @": (),
    "plan -m @": (),
    "batch @ -o out.jsonl -m m.gguf": (),
    "batch file -o @ -m m.gguf": (),
    "profile -m @ --text file": (),
    "profile -m m.gguf --text @": (),
    "pull smollm2-135m --cache @": ("full",),
    "ls --cache @": ("full", "file/x", "dangling/x", "loop", "/proc/x"),
    "rm x --cache @": (),
    "doctor --cache @": ("full", "file/x", "dangling/x", "loop", "/proc/x"),
    "worker --attached --listen 127.0.0.1:0 --model-dir @": ("full", "file/x", "dangling/x", "loop", "/proc/x"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_one_sentence_of_an_odd_path(
    command: str, places: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in ODD:
        if path in COMMANDS[command]:
            continue
        code = run_command([path if word == "@" else word for word in command.split()])
        said = capsys.readouterr().err.strip().splitlines()
        assert code in (1, 2), (command, path, said)
        assert said, (command, path)
        assert "Traceback" not in "".join(said)
        assert said[-1].startswith(("tpi: ", "Error: ")), said


@pytest.mark.parametrize("variable", ["TPI_CACHE", "TPI_CONFIG", "HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"])
@pytest.mark.parametrize("command", ["ls", "rm x", "pull smollm2-135m", "keys list", "run -m m.gguf -p hi"])
def test_every_command_says_one_sentence_of_an_odd_environment(
    command: str, variable: str, places: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in FAMILIAR:
        monkeypatch.setenv(name, str(places / "file"))  # where nothing can be written
    for path in ("file", "fifo", "full/file/x", "dangling", "loop/x", "n" * 300, "~no-such-user/x", "caf\udce9"):
        monkeypatch.setenv(variable, path)
        run_command(command.split())
        said = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("tpi: ", "Error: "))]
        assert len(said) <= 1, (path, said)


@pytest.mark.parametrize("variable", ["TPI_CACHE", "HOME"])
def test_a_cache_that_cannot_be_written_names_the_variable(
    variable: str, places: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TPI_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv(variable, str(places / "file"))
    assert run_command(["pull", "smollm2-135m"])
    assert "TPI_CACHE" in capsys.readouterr().err


def test_a_topology_that_is_not_text_is_a_sentence(places: Path) -> None:
    with pytest.raises(UsageError, match="file is not UTF-8 text"):
        load_topology("file")


def test_options_take_paths_from_one_place() -> None:
    """`click.Path` replaces no `~`, and takes an empty text as the working directory."""
    files = [file for room in ("tpi", "worker", "master", "testbed") for file in (ROOT / room).rglob("*.py")]
    found = [file for file in files if file.name != "paths.py" and re.search(r"click\.(Path|File)\(", file.read_text())]
    assert not found


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_model_whose_file_is_a_fifo_is_refused_at_once(
    name: str, places: Path, tiny_model: Callable[[str], TinyModel], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(tiny_model("llama").directory, places / "model")
    (places / "model" / name).unlink()
    os.mkfifo(places / "model" / name)
    assert run_command(["run", "-m", "model", "-p", "hi"]) == 2
    assert f"{name} is not a regular file" in capsys.readouterr().err


@pytest.mark.parametrize("output", ["fifo", "/dev/null", "full"])
def test_answers_of_a_batch_need_a_regular_file(output: str, places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
    Path("lines").write_text(json.dumps(body))
    assert run_command(["batch", "lines", "-o", output, "-m", "m.gguf"]) == 2
    assert "not a regular file" in capsys.readouterr().err or output == "full"


@pytest.mark.parametrize("command", ["run -p hi -n 1 -m @ --trace fifo", "plan -m @ --batch 8 --svg fifo"])
def test_a_fifo_that_no_process_reads_is_not_waited_for(
    command: str, places: Path, tiny_model: Callable[[str], TinyModel], capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny_model("llama").directory)
    assert run_command([model if word == "@" else word for word in command.split()]) == 2
    assert "fifo" in capsys.readouterr().err


def test_plan_looks_at_the_picture_before_the_model(
    places: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = ["plan", "-m", "no-such-model", "--batch", "8", "--svg"]
    assert run_command([*plan, "nowhere/roofs.svg"]) == 2
    assert "nowhere/roofs.svg cannot be written: No such file or directory" in capsys.readouterr().err
    roofs = tmp_path / "roofs.svg"
    for text in (None, "of an earlier plan"):
        if text is not None:
            roofs.write_text(text)
        assert run_command([*plan, str(roofs)]) != 0
        assert "no-such-model" in capsys.readouterr().err
        assert (roofs.read_text() if roofs.exists() else None) == text


def test_keys_are_not_read_from_a_fifo(tmp_path: Path) -> None:
    for name in ("keys.json", "identity.json"):
        os.mkfifo(tmp_path / name, 0o600)
    with pytest.raises(UsageError, match=r"keys.json is not a regular file; remove it"):
        KeyRing(tmp_path).read()
    with pytest.raises(UsageError, match=r"identity.json is not a regular file; remove it"):
        load_identity(tmp_path)
