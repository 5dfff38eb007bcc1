"""A damaged, truncated or missing file of the master's own pack is made again, or the error names the way out."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from master.workers.weights import PackSource
from tests.support.commands import run_json, tpi
from tests.support.models import TinyModel
from tests.support.weights.packs import quiet
from tpi.errors import WeightsError
from tpi.net.transfers import Need
from tpi.pack.library.locate import open_model
from tpi.pack.library.record import PackRecord
from tpi.pack.reader import Pack, PackBlock

Models: TypeAlias = Callable[[str], TinyModel]
Damage: TypeAlias = Callable[[Path], None]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def contents(pack: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in pack.iterdir() if not path.name.startswith(".")}


@pytest.fixture
def pack(tiny_model: Models, tmp_path: Path) -> Pack:
    return open_model(str(tiny_model("llama").directory), "q8", tmp_path, quiet)


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
@pytest.mark.parametrize("of", ["attention", "embedding", "manifest.json", "tokenizer.json"])
def test_what_is_damaged_is_made_again_with_one_line(
    of: str,
    damage: Damage,
    pack: Pack,
    tiny_model: Models,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    blocks = {"attention": pack.layers[1][0], "embedding": pack.embedding}
    path = blocks[of].path if of in blocks else pack.path / of
    before = contents(pack.path)
    damage(path)
    source = str(tiny_model("llama").directory)
    again = open_model(source, "q8", tmp_path, quiet)
    assert contents(again.path) == before
    again.verify()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert re.match(rf"tpi: .*{path.name}.*; making it again from {source}", lines[0])
    open_model(source, "q8", tmp_path, quiet)
    assert capsys.readouterr().err == ""


def test_only_what_is_new_is_read_again(pack: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    verify = PackBlock.verify

    def noted(block: PackBlock) -> None:
        checked.append(block.path)
        verify(block)

    monkeypatch.setattr(PackBlock, "verify", noted)
    open_model(str(pack.path), "auto", tmp_path, quiet)
    assert checked == []
    os.utime(pack.head.path)
    open_model(str(pack.path), "auto", tmp_path, quiet)
    assert checked == [pack.head.path]
    copy = tmp_path / "copy"
    shutil.copytree(pack.path, copy)
    for _ in range(2):
        open_model(str(copy), "auto", tmp_path, quiet)
    assert len(checked) == 1 + len(pack.blocks)


def test_a_pack_that_is_named_is_mended_from_where_it_came(
    tiny_model: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, made = tmp_path / "model", tmp_path / "pack"
    shutil.copytree(tiny_model("llama").directory, source)
    done = tpi("pack", str(source), "-o", str(made), "--dtype", "q8", cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    before = contents(made)
    for damaged in (Pack.open(made).head.path, made / "manifest.json"):
        damaged.unlink()
        open_model(str(made), "auto", tmp_path / "cache", quiet)
        assert contents(made) == before
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_old_gate_first_pack_is_replaced_or_refused(
    tiny_model: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, made, cache = tmp_path / "model", tmp_path / "pack", tmp_path / "cache"
    shutil.copytree(tiny_model("llama").directory, source)
    done = tpi("pack", str(source), "-o", str(made), "--dtype", "q8", cache=cache)
    assert done.returncode == 0, done.stderr
    before = contents(made)
    manifest, record = json.loads((made / "manifest.json").read_text()), PackRecord.load(cache, made)
    runs = next(block["runs"] for block in manifest["blocks"].values() if block["kind"] == "ffn")
    runs.insert(0, {**runs[0], "name": "gate", "parts": [runs[0]["parts"][0]]})
    (made / "manifest.json").write_text(json.dumps(manifest))
    record.file.write_text(json.dumps({**json.loads(record.file.read_text()), "gate_first": True}))
    shutil.copytree(made, tmp_path / "copy")
    open_model(str(made), "auto", cache, quiet)
    assert contents(made) == before
    said = "manifest.json cannot be used (it was made with tpi pack --gate-first, which this version does not have)"
    assert capsys.readouterr().err == f"tpi: {made}/{said}; making it again from {source}\n"
    with pytest.raises(WeightsError, match=re.escape(f"{said}, and the source of the pack is not known")):
        open_model(str(tmp_path / "copy"), "auto", cache, quiet)


def test_a_missing_source_is_named_with_the_command(tiny_model: Models, tmp_path: Path) -> None:
    source, cache = tmp_path / "model", tmp_path / "cache"
    shutil.copytree(tiny_model("llama").directory, source)
    pack = open_model(str(source), "q8", cache, quiet)
    flip(pack.layers[0][1].path)
    (source / "config.json").write_text((source / "config.json").read_text() + " ")
    command = re.escape(f"delete {pack.path} and make it again with: tpi pack {source} -o {pack.path} --dtype q8")
    with pytest.raises(WeightsError, match=rf"is damaged, and its source {source} has changed since; {command}"):
        open_model(str(pack.path), "auto", cache, quiet)
    shutil.rmtree(source)
    with pytest.raises(WeightsError, match=rf"is damaged, and its source {source} is gone; .*{command}"):
        open_model(str(pack.path), "auto", cache, quiet)
    PackRecord.load(cache, pack.path).file.unlink()
    with pytest.raises(WeightsError, match=r"not known on this machine; delete .* tpi pack MODEL -o .* --dtype q8"):
        open_model(str(pack.path), "auto", cache, quiet)


def test_a_run_mends_its_pack_and_answers_as_before(tiny_model: Models, tmp_path: Path) -> None:
    flags = ("-m", str(tiny_model("llama").directory), "-p", "Hello", "-n", "4", "--temp", "0", "--dtype", "f32")
    first = run_json(*flags, cache=tmp_path)
    (packed,) = (path for path in (tmp_path / "packs").iterdir() if path.is_dir())
    for path in (Pack.open(packed).embedding.path, Pack.open(packed).layers[0][0].path):
        flip(path)
        done = tpi("run", *flags, "--json", cache=tmp_path)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["token_ids"] == first["token_ids"]
        assert "making it again from" in done.stderr


def test_damage_in_transit_is_named_and_mended_at_the_next_start(
    pack: Pack, tiny_model: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, block = PackSource(pack), pack.layers[0][0]
    need = Need(bytes.fromhex(block.id), "query", 0, block.run("query").units)
    good = bytes(source.read(need))
    with block.path.open("r+b") as file:
        file.seek(block.offset("query"))
        file.write(bytes([good[0] ^ 1]))
    found = block.path.stat()
    with pytest.raises(WeightsError, match=rf"{block.path} is damaged: unit 0 of query .*; run the command again"):
        source.read(need)
    assert block.path.stat().st_mtime_ns != found.st_mtime_ns  # so that the next start looks at it
    again = open_model(str(tiny_model("llama").directory), "q8", tmp_path, quiet)
    assert "making it again" in capsys.readouterr().err
    assert bytes(PackSource(again).read(need)) == good
