"""Texts in 20 scripts become the token ids that llama.cpp's tokenizer gives, with the vocabularies of published models.

The data has 571 texts, and of each vocabulary the tokens and merges that these texts use. The ids are checksums of
those of `llama_tokenize`, renumbered. gpt-oss and Mistral's Tekken have the ids of their own tokenizers instead:
llama.cpp splits words by case in a simpler way. Where a model's tokenizer normalises text to NFC, which llama.cpp does
not do, the ids are those of the normalised text.
"""

import json
import lzma
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from gguf import GGUFWriter

from tests.support.paths import DATA
from tpi.pack.builder.ggufvocab import convert
from tpi.sources.gguf import open_gguf

NAMES = (
    "command-r", "deepseek-llm", "deepseek-v3", "falcon", "gemma-4", "gpt-2", "gpt-oss", "llama-bpe", "llama-spm",
    "qwen2", "qwen35", "starcoder", "tekken",
)  # fmt: skip


@pytest.fixture(scope="module")
def data() -> Any:
    return json.loads(lzma.decompress((DATA / "real_vocabularies.json.xz").read_bytes()))


def write_vocabulary(path: Path, vocabulary: Any) -> None:
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(vocabulary["model"])
    if vocabulary["pre"]:
        writer.add_tokenizer_pre(vocabulary["pre"])
    tokens = vocabulary["tokens"]
    writer.add_token_list(tokens)
    writer.add_token_types(vocabulary["kinds"])
    writer.add_add_space_prefix(vocabulary["prefix"])
    if "scores" in vocabulary:
        writer.add_token_scores(vocabulary["scores"])
    else:
        writer.add_token_merges([f"{tokens[left]} {tokens[right]}" for left, right in vocabulary["merges"]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def test_the_data_has_all_vocabularies(data: Any) -> None:
    assert (len(data["texts"]), sorted(data["vocabularies"])) == (571, sorted(NAMES))


@pytest.mark.parametrize("name", NAMES)
def test_ids_equal_those_of_llama_cpp(name: str, data: Any, tmp_path: Path) -> None:
    vocabulary = data["vocabularies"][name]
    write_vocabulary(tmp_path / "vocabulary.gguf", vocabulary)
    tokenizer = convert(open_gguf(tmp_path / "vocabulary.gguf"))
    found = [tokenizer.encode(text, add_special_tokens=False).ids for text in data["texts"]]
    said = [crc32(" ".join(map(str, ids)).encode()) for ids in found]
    assert [text for text, ours, own in zip(data["texts"], said, vocabulary["ids"], strict=True) if ours != own] == []
