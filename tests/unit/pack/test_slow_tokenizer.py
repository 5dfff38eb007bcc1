"""Directories whose tokenizer is in a format of its own: transformers converts it."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from tpi.errors import ModelError
from tpi.pack.builder.tokens import from_directory

END = "<|endoftext|>"
WORDS = [*sorted(ByteLevel.alphabet()), "th", "the", "Ġthe", END]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a directory with GPT-2's two files."""
    folder = tmp_path / "model"
    folder.mkdir()
    contents = {
        "vocab.json": {word: index for index, word in enumerate(WORDS)},
        "config.json": {"model_type": "gpt2", "vocab_size": len(WORDS)},
        "tokenizer_config.json": {
            "tokenizer_class": "GPT2Tokenizer",
            "eos_token": END,
            "clean_up_tokenization_spaces": False,
        },
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "merges.txt").write_text("#version: 0.2\nt h\nth e\nĠ the\n")
    return folder


def test_files_of_gpt2_are_converted(model: Path, tmp_path: Path) -> None:
    said = from_directory(model, {}, len(WORDS), tmp_path)
    saved = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert saved.encode(f"the the{END}").tokens == ["the", "Ġthe", END]
    assert said["eos_ids"] == [len(WORDS) - 1]


def test_files_that_cannot_be_converted_are_named(model: Path, tmp_path: Path) -> None:
    (model / "vocab.json").write_text("[")
    with pytest.raises(ModelError, match="cannot be converted"):
        from_directory(model, {}, 8, tmp_path)
