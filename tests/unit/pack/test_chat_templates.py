"""The chat templates of a pack, from all the places in which models have them."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from tests.support.models import TinyModel
from tests.support.weights.gguf_models import byte_level_vocabulary, write_gguf
from tpi.pack.builder import tokens
from tpi.pack.library.locate import Located, pack_name
from tpi.sources.gguf import open_gguf

Models = Callable[[str], TinyModel]
LISTED = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]

PLACES: dict[str, tuple[Any, dict[str, str], tuple[str | None, str | None]]] = {
    "a text": ("plain", {}, ("plain", None)),
    "a list": (LISTED, {}, ("plain", "tools")),
    "a list without a default": ([LISTED[1], {"name": "rag", "template": "rag"}], {}, ("rag", "tools")),
    "a list of one for tools": ([LISTED[1]], {}, ("tools", None)),
    "a file": (None, {"chat_template.jinja": "own"}, ("own", None)),
    "a file beside a text": ("plain", {"chat_template.jinja": "own"}, ("own", None)),
    "a file beside a list": (LISTED, {"chat_template.jinja": "own"}, ("own", None)),
    "files": (
        "plain",
        {"chat_template.jinja": "own", "additional_chat_templates/tool_use.jinja": "own tools"},
        ("own", "own tools"),
    ),
    "a file for tools": ("plain", {"additional_chat_templates/tool_use.jinja": "own tools"}, ("plain", "own tools")),
    "JSON": (None, {"chat_template.json": '{"chat_template": "json"}'}, ("json", None)),
    "JSON beside a text": ("plain", {"chat_template.json": '{"chat_template": "json"}'}, ("plain", None)),
    "nowhere": (None, {}, (None, None)),
}


@pytest.mark.parametrize("place", PLACES)
def test_templates_of_a_directory(place: str, tiny_model: Models, tmp_path: Path) -> None:
    setting, files, expected = PLACES[place]
    source = tmp_path / "model"
    copytree(tiny_model("llama").directory, source)
    settings = json.loads((source / "tokenizer_config.json").read_text()) | {"chat_template": setting}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    before = pack_name(Located("directory", source, "model"), "f32")
    for name, text in files.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    found = tokens.from_directory(source, {}, 512, tmp_path)
    assert (found["chat_template"], found.get("tool_template")) == expected
    assert (pack_name(Located("directory", source, "model"), "f32") == before) == (not files)


def test_a_template_in_a_hub_snapshot(tiny_model: Models, tmp_path: Path) -> None:
    """A file may be a link to a blob of the hub. A directory that is a link to another place is not followed."""
    repository = tmp_path / "models--a--b"
    source = repository / "snapshots" / "abc"
    copytree(tiny_model("llama").directory, source)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "1").write_text("own tools")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").symlink_to("../../../blobs/1")
    assert tokens.from_directory(source, {}, 512, tmp_path)["tool_template"] == "own tools"
    elsewhere = tmp_path / "elsewhere"
    (source / "additional_chat_templates").rename(elsewhere)
    (source / "additional_chat_templates").symlink_to(elsewhere)
    assert "tool_template" not in tokens.from_directory(source, {}, 512, tmp_path)


@pytest.mark.parametrize(
    ("listed", "expected"), [(LISTED, ("plain", "tools")), (LISTED[:1], ("plain", None)), (LISTED[1:], ("tools", None))]
)
def test_templates_of_a_gguf_file(
    listed: list[dict[str, str]], expected: tuple[str, str | None], tiny_model: Models, tmp_path: Path
) -> None:
    model = tiny_model("llama")
    vocabulary = byte_level_vocabulary(model.directory, template=listed)
    write_gguf(tmp_path / "m.gguf", model, "llama", vocabulary=vocabulary)
    found = tokens.from_gguf(open_gguf(tmp_path / "m.gguf"), tmp_path)
    assert (found["chat_template"], found.get("tool_template")) == expected
