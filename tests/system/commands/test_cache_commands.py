"""`tpi ls`, `tpi rm` and `--cache-limit`: what is listed, what is removed, and what is never removed."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from click.testing import CliRunner

import tpi.cli
from tests.support.commands import listening_worker, run_json
from tests.support.commands import tpi as process
from tests.support.models import TinyModel
from tests.support.weights.packs import names, quiet
from tpi.cachelimit import CacheLimit
from tpi.errors import TpiError, UsageError
from tpi.pack.library.hold import Hold
from tpi.pack.library.locate import open_model
from tpi.pack.library.pull import ALIASES
from worker.shards.inventory import entries, keep_within

Models: TypeAlias = Callable[[str], TinyModel]
FILE = Path(ALIASES["smollm2-135m"].member).name


def command(*arguments: str, cache: Path) -> str:
    """Run a command that must succeed; return its output, stdout and stderr together."""
    done = CliRunner().invoke(tpi.cli.tpi, [*arguments, "--cache", str(cache)], catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def listed(cache: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(command("ls", "--json", cache=cache))["entries"]
    return found


def make(cache: Path, source: Path, *dtypes: str, used: int = 10**9) -> list[Path]:
    """Make packs whose last uses are in this order, a second apart."""
    made = [open_model(str(source), dtype, cache, quiet).path for dtype in dtypes]
    for number, path in enumerate(made):
        os.utime(path / ".used", (used + number, used + number))
    return made


@pytest.fixture
def source(tiny_model: Models, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model("llama").directory, tmp_path / "tiny"))


def test_a_run_is_listed_and_removed(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    flags = ("-m", str(source), "-p", "Hi", "-n", "2", "--temp", "0", "--local", "1")
    tokens = run_json(*flags, cache=cache)["token_ids"]
    found = listed(cache)
    assert {entry["kind"] for entry in found} == {"pack", "shards"}
    assert all(entry["bytes"] > 0 and entry["can_be_made_again"] and not entry["in_use"] for entry in found)
    assert len({entry["name"] for entry in found}) == 1
    shown = process("ls", cache=cache)
    assert all(len(line) <= 80 for line in shown.stdout.splitlines()[:-1])
    assert "worker-1" in shown.stdout
    command("rm", "--shards", cache=cache)
    assert [entry["kind"] for entry in listed(cache)] == ["pack"]
    assert "removed 1 of 1" in command("rm", "tiny", cache=cache)
    assert listed(cache) == []
    assert names(cache / "packs") == set()
    assert run_json(*flags, cache=cache)["token_ids"] == tokens
    command("rm", "tiny", cache=cache)
    assert listed(cache) == []


def test_an_old_gate_first_pack_is_listed_and_removed(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (path,) = make(cache, source, "q8")
    old = path.rename(path.with_name(f"tiny-q8-gate-first-{path.name[-16:]}"))
    assert [entry["name"] for entry in listed(cache)] == [old.name]
    assert "removed 1 of 1" in command("rm", "tiny", cache=cache)
    assert listed(cache) == []


def test_an_unknown_name_is_one_sentence_with_what_is_near(source: Path, tmp_path: Path) -> None:
    (path,) = make(tmp_path / "cache", source, "q8")
    for name, words in (("tin", f"similar names: {path.name}"), ("zzz", "`tpi ls` lists")):
        with pytest.raises(UsageError, match=words):
            command("rm", name, cache=tmp_path / "cache")
    with pytest.raises(UsageError, match="no entries to remove are named"):
        command("rm", cache=tmp_path / "cache")
    assert path.is_dir()


def test_a_terminal_is_asked_first(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = make(tmp_path, source, "q8")
    monkeypatch.setattr("worker.cachecommands._is_interactive", lambda: True)
    flags = ["rm", "tiny-q8", "--cache", str(tmp_path)]
    refused = CliRunner().invoke(tpi.cli.tpi, flags, input="n\n")
    assert refused.exit_code == 1
    assert f"Remove pack {path.name} (" in refused.output
    assert path.is_dir()
    assert CliRunner().invoke(tpi.cli.tpi, flags, input="y\n").exit_code == 0
    assert not path.exists()
    (path,) = make(tmp_path, source, "q8")
    command("rm", "tiny-q8", "--yes", cache=tmp_path)
    assert not path.exists()


def test_what_is_in_use_is_not_removed(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    kept, other = make(cache, source, "q8", "f32")
    hold = Hold(kept)
    assert [entry["in_use"] for entry in sorted(listed(cache), key=lambda entry: entry["name"])] == [False, True]
    with pytest.raises(TpiError, match=f"{kept.name}: in use by a running process"):
        command("rm", "tiny", cache=cache)
    assert names(cache / "packs") == {kept.name}
    keep_within(cache, CacheLimit(0))
    assert kept.is_dir()
    hold.close()
    command("rm", kept.name, cache=cache)
    assert not kept.exists()
    assert not other.exists()


def test_a_pack_in_the_cache_is_held_as_long_as_it_lives(source: Path, tmp_path: Path) -> None:
    pack = open_model(str(source), "q8", tmp_path, quiet)
    assert [entry.in_use for entry in entries(tmp_path)] == [True]
    del pack
    assert [entry.in_use for entry in entries(tmp_path)] == [False]


def test_the_limit_evicts_the_least_recently_used_copies(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    gone = Path(shutil.copytree(source, tmp_path / "gone"))
    (lost,) = make(cache, gone, "q8", used=1)
    (cache / "models").mkdir()
    (cache / "models" / FILE).write_bytes(bytes(10000))
    oldest, middle, latest = make(cache, source, "f32", "bf16", "q8")
    shutil.rmtree(gone)
    sizes = {entry.name: entry.nbytes for entry in entries(cache)}
    everything = sum(sizes.values())
    assert [entry.name for entry in keep_within(cache, CacheLimit(everything))] == []
    assert [entry.name for entry in keep_within(cache, CacheLimit(everything), needed=1)] == [oldest.name]
    assert {entry.name for entry in keep_within(cache, CacheLimit(0))} == {middle.name, latest.name}
    assert names(cache / "packs") == {lost.name}
    assert names(cache / "models") == {FILE}
    assert f"kept {lost.name}: the source files are gone" in command("rm", "--all", cache=cache)
    assert names(cache / "packs") == {lost.name}
    assert names(cache / "models") == set()
    command("rm", lost.name, cache=cache)
    assert names(cache / "packs") == set()


def test_a_run_keeps_the_cache_within_its_limit(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    flags = ("-m", str(source), "-p", "Hi", "-n", "2", "--local", "1")
    run_json(*flags, "--dtype", "f32", cache=cache)
    before = {entry["name"] for entry in listed(cache)}
    run_json(*flags, "--dtype", "q8", cache=cache, TPI_CACHE_LIMIT="1kB")
    after = {entry["name"] for entry in listed(cache)}
    assert len(after) == 1
    assert not before & after
    with pytest.raises(UsageError, match="'much' is not a size"):
        command("ls", "--cache-limit", "much", cache=cache)


def test_the_default_limit_leaves_as_much_as_it_takes() -> None:
    assert CacheLimit().allowed(held=30, free=10) == 20
    assert CacheLimit(5).allowed(held=30, free=10) == 5


def test_a_worker_refuses_shards_beyond_its_limit(source: Path, tmp_path: Path) -> None:
    with listening_worker(tmp_path / "lent", "--cache-limit", "1kB") as address:
        done = process("run", "-m", str(source), "-p", "Hi", "--workers", address, cache=tmp_path / "cache")
    assert done.returncode == 1
    assert "is limited to 0 MiB; raise --cache-limit on this node" in done.stderr
