"""GGUF models in several files: opened by any file or by their directory, and refused if files do not fit together."""

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.support.models import TinyModel
from tests.support.weights.gguf_models import byte_level_vocabulary, write_gguf
from tests.support.weights.packs import names, quiet
from tpi.errors import ModelError
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.library.locate import identity, locate, open_model, pack_name
from tpi.pack.reader import Pack
from tpi.sources.gguf import open_gguf
from tpi.sources.ggufparts import gguf_name, gguf_parts

Models: TypeAlias = Callable[[str], TinyModel]


@pytest.fixture
def parts(tiny_model: Models, tmp_path: Path) -> list[Path]:
    """Return the files of one small model."""
    folder = tmp_path / "split"
    folder.mkdir()
    model = tiny_model("llama")
    write_gguf(folder / "m.gguf", model, "llama", vocabulary=byte_level_vocabulary(model.directory), split=9)
    found = sorted(folder.glob("*.gguf"))
    assert len(found) > 2
    return found


def test_any_part_and_the_directory_mean_the_whole_model(parts: list[Path], tiny_model: Models, tmp_path: Path) -> None:
    model = tiny_model("llama")
    write_gguf(tmp_path / "m.gguf", model, "llama", vocabulary=byte_level_vocabulary(model.directory))
    pack_model(open_source(tmp_path / "m.gguf"), "f32", tmp_path / "whole", quiet)
    for number, spec in enumerate((parts[0], parts[-1], parts[0].parent)):
        located = locate(str(spec), tmp_path, quiet)
        assert (located.kind, located.path, located.name) == ("gguf", parts[0], "m")
        pack_model(open_source(located.path), "f32", tmp_path / str(number), quiet)
        assert names(tmp_path / str(number)) == names(tmp_path / "whole")  # blocks are named by their content
        assert Pack.open(tmp_path / str(number)).manifest.source == "m"


def test_a_pack_depends_on_all_parts_and_is_mended_from_them(parts: list[Path], tmp_path: Path) -> None:
    pack = open_model(str(parts[1]), "f32", tmp_path / "cache", quiet)
    block = max(pack.path.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    whole = block.read_bytes()
    block.write_bytes(whole[:-1])
    open_model(str(parts[0]), "f32", tmp_path / "cache", quiet)
    assert block.read_bytes() == whole
    located = locate(str(parts[0]), tmp_path, quiet)
    before = pack_name(located, "f32")
    assert before.endswith(identity(parts[2], "f32"))
    shutil.copy(parts[-1], tmp_path / "kept")
    parts[-1].unlink()
    assert pack_name(located, "f32") != before


def renumbered(path: Path, key: str, value: int) -> None:
    """Change one of the numbers of 16 bits (the count of tensors: 32) in the metadata of a file."""
    raw = path.read_bytes()
    at = raw.index(key.encode()) + len(key) + 4
    form = "<I" if key == "split.tensors.count" else "<H"
    path.write_bytes(raw[:at] + struct.pack(form, value) + raw[at + struct.calcsize(form) :])


def renumber_all(parts: list[Path], tensors: int) -> None:
    for part in parts:
        renumbered(part, "split.tensors.count", tensors)


def put_fifo(part: Path) -> None:
    part.unlink()
    os.mkfifo(part)


@pytest.mark.parametrize("named", [0, 1])
@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda parts: parts[-1].unlink(), r"00.-of-.*gguf is missing, one of the \d files .*; download it too"),
        (lambda parts: parts[0].unlink(), r"m-00001-of-.*gguf is missing, one of the \d files .*; download it too"),
        (lambda parts: renumbered(parts[1], "split.no", 0), r"its header says part 0 \(from 0\) of \d, but its name"),
        (lambda parts: renumbered(parts[2], "split.count", 9), r"its header says part 2 \(from 0\) of 9, but its name"),
        (lambda parts: renumbered(parts[0], "split.tensors.count", 9), r"another model .*split.tensors.count differs"),
        (lambda parts: renumber_all(parts, 999), r"hold \d+ tensors, not 999; download them again"),
        (lambda parts: shutil.copy(parts[2], parts[1]), r"its header says part 2 \(from 0\)"),
        (lambda parts: parts[2].write_bytes(parts[2].read_bytes()[:-40]), r"ends after the end of the file"),
        (lambda parts: parts[2].write_bytes(b"<html>"), r"m-00003-of"),
        (lambda parts: put_fifo(parts[2]), r"m-00003-of.* is not a regular file; put the file itself there"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    named: int, harm: Callable[[list[Path]], object], words: str, parts: list[Path]
) -> None:
    harm(parts)
    with pytest.raises(ModelError, match=words):
        open_gguf(gguf_parts(parts[named])[0])


def test_a_tensor_of_two_parts_is_refused(parts: list[Path]) -> None:
    tensors = open_gguf(parts[0]).tensors.values()
    mine = next(tensor.name for tensor in tensors if tensor.path == parts[0] and tensor.name.startswith("blk.0"))
    other = next(tensor.name for tensor in tensors if tensor.path == parts[1] and len(tensor.name) == len(mine))
    parts[1].write_bytes(parts[1].read_bytes().replace(other.encode(), mine.encode()))
    with pytest.raises(ModelError, match=rf"repeats tensor '{mine}' of m-00001-of"):
        open_gguf(parts[0])


def test_a_part_under_another_name_is_refused(parts: list[Path]) -> None:
    lone = parts[1].with_name("renamed.gguf")
    parts[1].rename(lone)
    with pytest.raises(ModelError, match=r"renamed.gguf is part of a model in \d files, but its name says 1;"):
        open_gguf(lone)


def test_parts_of_another_model_are_refused(parts: list[Path]) -> None:
    raw, key, value = parts[1].read_bytes(), b"general.architecture", b"another architecture    "
    entry = struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, len(value)) + value
    assert len(entry) % 32 == 0  # what follows stays aligned
    pairs = struct.unpack_from("<Q", raw, 16)[0]
    parts[1].write_bytes(raw[:16] + struct.pack("<Q", pairs + 1) + entry + raw[24:])
    with pytest.raises(ModelError, match=r"another model than .*: general.architecture differs"):
        open_gguf(parts[0])


def test_a_directory_of_several_models_names_them(parts: list[Path], tmp_path: Path) -> None:
    folder = parts[0].parent
    shutil.copy(parts[0], folder / "mmproj-f16.gguf")  # what turns images into vectors is not the model
    (folder / "config.json").write_text("{}")  # of the model that it was made from
    assert locate(str(folder), tmp_path, quiet).path == parts[0]
    shutil.copy(parts[0], folder / "other.Q4_0.gguf")
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"it holds 2 GGUF models, name one of .*m-00001-of-.*, .*other.Q4_0.gguf"):
        locate(str(folder), tmp_path, quiet)


@pytest.mark.parametrize(
    ("name", "count", "model"),
    [
        ("a-00002-of-00003.gguf", 3, "a"),
        ("a.gguf", 1, "a"),
        ("a-00004-of-00003.gguf", 1, "a"),
        ("a-00000-of-00003.gguf", 1, "a"),
        ("a-00001-of-99999.gguf", 1, "a"),
        ("a-1-of-3.gguf", 1, "a-1-of-3"),
    ],
)
def test_names_of_parts(name: str, count: int, model: str) -> None:
    assert (len(gguf_parts(Path("x", name))), gguf_name(Path(name))) == (count, model)
