"""Byte-level vocabularies of GGUF files split text as each model's pattern does in another engine (`regex`)."""

import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import regex  # type: ignore[import-untyped]
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.models import TEXT, TinyModel
from tests.support.weights.gguf_models import (
    byte_level_vocabulary,
    sentencepiece_tokens,
    sentencepiece_vocabulary,
    write_gguf,
)
from tests.support.weights.packs import quiet
from tpi.errors import ModelError
from tpi.families.gguf.words import WORDS
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack

Models: TypeAlias = Callable[[str], TinyModel]

GPT2 = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
GPT4 = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"""
    r"""|\s+(?!\S)|\s+"""
)
QWEN2 = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"""
    r"""|\s+(?!\S)|\s+"""
)
QWEN35 = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"""
    r"""|\s+(?!\S)|\s+"""
)
TEKKEN = (
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"""
    r"""|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"""
    r"""|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
GPT4O = (
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
KIMI = (
    r"""[\p{Han}]+"""
    r"""|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"""
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"""
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
SEED = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+"""
    r"""|\s+(?!\S)|\s+"""
)
EXAONE = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"""
    r"""| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"""
)
DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"""|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
# The steps of each: what is matched, and what is between matches, is split by the next.
OWN: dict[str, tuple[str, ...]] = {
    "gpt-2": (GPT2,),
    "olmo": (GPT2,),
    "refact": (r"\p{N}", GPT2),
    "smollm": (r"\p{N}", GPT2),
    "starcoder": (r"\p{N}", GPT2),
    "command-r": (r"\p{N}", GPT2),
    "llama-bpe": (GPT4,),
    "dbrx": (GPT4,),
    "glm4": (GPT4,),
    "qwen2": (QWEN2,),
    "deepseek-r1-qwen": (QWEN2,),
    "qwen35": (QWEN35,),
    "tekken": (TEKKEN,),
    "gpt-4o": (GPT4O,),
    "llama4": (GPT4O,),
    "kimi-k2": (KIMI,),
    "exaone-moe": (EXAONE,),
    "seed-coder": (SEED,),
    "minicpm5": (r"\p{N}{1,3}", GPT4.replace("{1,3}", "+")),
    "deepseek-v3": (r"\p{N}{1,3}", r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", DEEPSEEK3),
    "deepseek-coder": (
        r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}",
    ),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}  # fmt: skip
TEXTS = (
    "I've been 'told he's there, 'RE you sure? 'M not sure I'll make it, 'D you like some tea? We'Ve a'lL",
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n x\r\n\r\ny  ",
    "3 33 333 3333 33333 333333 3333333 3.3 3..3 3...3 \u0663\u0664\u2162\u00bd 1,000,000",
    "\U0001f680 (normal) \U0001f636\u200d\U0001f32b\ufe0f \u2705 \U0001f999\U0001f999",
    "\u6211\u60f3\u5728apple\u5de5\u4f5c1314151\u5929\uff5e ------======= \u043d\u0435\u0449\u043e",
    "HelloWorld XMLHttpRequest camelCase SNAKE_CASE fooBAR \u01c5ivo na\u00efve e\u0301",
    "\u1780\u17b6\u1793\u17cb\u178f\u17c2 \u0e2a\u0e27\u0e31\u0e2a \ud55c\uad6d\uc5b4 \u3072\u3089\u30ab\u30ca",
    'path/to//file.py\n/// <b>x</b> ```` """....!!!!?? $100 + ~5^2 | a=b',
)


def reference(steps: tuple[str, ...], text: str) -> list[str]:
    """Split `text` by each pattern in turn."""
    pieces = [text]
    for step in steps:
        pattern, split = regex.compile(step, regex.V1), []
        for piece in pieces:
            at = 0
            for match in pattern.finditer(piece):
                split += [piece[at : match.start()], match.group()]
                at = match.end()
            split.append(piece[at:])
        pieces = [piece for piece in split if piece]
    return pieces


def ours(name: str, text: str) -> list[str]:
    return [text[start:end] for _, (start, end) in WORDS[name].splitter().pre_tokenize_str(text)]


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("text", TEXTS)
def test_words_are_those_of_the_model_itself(name: str, text: str) -> None:
    assert ours(name, text) == reference(OWN[name], text)


def known(character: str) -> bool:
    """Return True if all engines have a character in their tables, and case-fold it in the same way."""
    return unicodedata.category(character) not in ("Cn", "Cs", "Co") and character not in "\u017f\u212a\x1c\x1d\x1e\x1f"


@settings(max_examples=150, deadline=None)
@given(
    st.text(st.one_of(st.sampled_from("'stdmlrve SDaB1234\n\r\t /.\u4e00\u3042\u0301"), st.characters().filter(known)))
)
def test_words_of_any_text_are_those_of_the_model_itself(text: str) -> None:
    for name, steps in OWN.items():
        assert ours(name, text) == reference(steps, text), name


def test_names_that_llama_cpp_takes_for_the_same_split_alike() -> None:
    for same in (
        "llama-bpe llama3 llama-v3 falcon3 pixtral midm-2.0",
        "dbrx smaug-bpe",
        "deepseek-r1-qwen megrez hunyuan",
        "gpt-2 phi-2 gigachat mellum",
        "smollm refact starcoder",
        "gpt-4o llama4 kanana2 minimax-m2",
        "deepseek-v3 joyai-llm hunyuan-dense",
    ):
        assert len({WORDS[name] for name in same.split()}) == 1


def test_each_documented_byte_level_family_has_its_words() -> None:
    """The names that llama.cpp's converter writes for the models of docs/models.md."""
    written = {
        "llama": "llama-bpe smaug-bpe smollm falcon3 deepseek-llm deepseek-coder seed-coder",
        "mistral": "tekken", "qwen": "qwen2 deepseek-r1-qwen", "phi": "dbrx gpt-4o", "smollm3": "llama-bpe smaug-bpe",
        "granite": "refact starcoder", "falcon": "falcon", "olmoe": "olmo", "dbrx": "dbrx", "gptoss": "gpt-4o",
        "deepseek": "deepseek-llm deepseek-v3 kimi-k2", "exaonemoe": "exaone-moe",
    }  # fmt: skip
    assert not [(family, name) for family, names in written.items() for name in names.split() if name not in WORDS]


@pytest.mark.parametrize(
    ("name", "whole", "bos"),
    [("llama-bpe", True, True), ("tekken", True, True), ("glm4", True, False), ("dbrx", False, False)],
)
def test_what_else_follows_from_the_name(name: str, whole: bool, bos: bool) -> None:
    assert (WORDS[name].tokens_first, WORDS[name].bos) == (whole, bos)


def packed(path: Path, tiny: TinyModel, vocabulary: Callable[[GGUFWriter], None], values: dict[str, Any]) -> Pack:
    """The pack of a GGUF file whose `tokenizer.ggml` metadata has other `values`; None takes a key out."""

    def write(writer: GGUFWriter) -> None:
        vocabulary(writer)
        for key, value in values.items():
            name = f"tokenizer.ggml.{key}"
            writer.kv_data[0].pop(name, None)
            if isinstance(value, bool):
                writer.add_bool(name, value)
            elif isinstance(value, list):
                writer.add_array(name, value)
            elif value is not None:
                writer.add_string(name, value)

    write_gguf(path / "m.gguf", tiny, "llama", vocabulary=write)
    pack_model(open_source(path / "m.gguf"), "f32", path / "pack", quiet)
    return Pack.open(path / "pack")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"pre": "brand-new"}, r"has a tokenizer.ggml.pre of 'brand-new': .*not known; convert the model again"),
        ({"pre": None}, r"has no tokenizer.ggml.pre, which says how text is split"),
        ({"pre": True}, r"has a tokenizer.ggml.pre of True"),
        *(({"model": kind}, f"tokenizer.ggml.model of '{kind}'") for kind in ("bert", "t5", "rwkv", "plamo2")),
        ({"model": None}, r"has no tokenizer.ggml.model; gpt2, llama and gemma4"),
        ({"remove_extra_whitespaces": True}, r"tokenizer.ggml.remove_extra_whitespaces of True"),
        ({"add_sep_token": True}, r"tokenizer.ggml.add_sep_token of True"),
        ({"precompiled_charsmap": [1, 2]}, r"tokenizer.ggml.precompiled_charsmap of \[1, 2\]"),
        ({"normalizer.lowercase": True}, r"tokenizer.ggml.normalizer.lowercase of True"),
        ({"merges": None}, r"it has no merges"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    values: dict[str, Any], words: str, tiny_model: Models, tmp_path: Path
) -> None:
    model = tiny_model("llama")
    with pytest.raises(ModelError, match=words):
        packed(tmp_path, model, byte_level_vocabulary(model.directory), values)
    assert not (tmp_path / "pack").exists()


def test_texts_begin_and_end_as_the_file_says(tiny_model: Models, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    model = tiny_model("llama")
    cases: list[tuple[dict[str, Any], bool, bool]] = [
        ({"pre": "llama-bpe"}, True, False),
        ({"pre": "tekken", "add_bos_token": False}, False, False),
        ({"pre": "qwen2", "add_eos_token": True}, False, True),
        ({"pre": "gpt-2", "add_bos_token": True, "add_eos_token": True}, True, True),
    ]
    for number, (values, begins, ends) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        pack = packed(folder, model, byte_level_vocabulary(model.directory), values)
        ids = Tokenizer.from_file(str(pack.tokenizer_file)).encode("the capital").ids
        assert (ids[0] == 1, ids[-1] == 2) == (begins, ends)
        assert pack.tokenizer_info["add_bos"] is begins


def test_sentencepiece_needs_no_splitting_and_has_default_ends(tiny_model: Models, tmp_path: Path) -> None:
    vocabulary = sentencepiece_vocabulary(sentencepiece_tokens(TEXT), True)
    pack = packed(tmp_path, tiny_model("llama"), vocabulary, {"bos_token_id": None, "eos_token_id": None})
    assert (pack.tokenizer_info["bos_id"], pack.tokenizer_info["eos_ids"]) == (1, [2])


def test_a_token_that_stands_twice_is_refused(tiny_model: Models, tmp_path: Path) -> None:
    model = tiny_model("llama")
    vocabulary = byte_level_vocabulary(model.directory)

    def twice(writer: GGUFWriter) -> None:
        vocabulary(writer)
        tokens = writer.kv_data[0]["tokenizer.ggml.tokens"].value
        tokens[5] = tokens[4]

    with pytest.raises(ModelError, match="is listed twice"):
        packed(tmp_path, model, twice, {})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("it's 42!\n\n x", ["it", "'", "s", " ", "4", "2", "!", "\n", "\n", " x"]),
        (" \u03b8\u1f7d, e\u0301  ", [" \u03b8", "\u1f7d", ",", " e", "\u0301", "  "]),  # its ideographs begin early
    ],
)
def test_words_of_deepseeks_first_models(text: str, words: list[str]) -> None:
    assert ours("deepseek-llm", text) == words
