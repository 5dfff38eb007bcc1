"""How a byte-level vocabulary splits text into words, by `tokenizer.ggml.pre`: as the tokenizer.json of each model."""

from typing import Any

from tokenizers import Regex, pre_tokenizers

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# The letters that DeepSeek's first tokenizers take together, as code points: those with an upper and a lower case, by
# the Unicode of then. As characters, some would become others where a text is normalised.
_CASED = """
41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 388-38a 38c 38e-3a1 3a3-3f5
3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a 1e00-1f15
1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3
1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128 212a-212d 212f-2134 2139
213c-213f 2145-2149 214e 2183 2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2 2cf3 a640-a66d a680-a69b a722-a76f a771-a787
a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2
118a0-118df 1e900-1e943
"""
_PUNCTUATION = "21-2f 3a-7e ff01-ff0f ff1a-ff5e 2018-201f 3000-3002"
_IDEOGRAPHS = "4e00-9fa5 800-4e00 ac00-d7ff"
_KANA = "4e00-9fa5 3040-309f 30a0-30ff"
_MARKS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""


def _one_of(code_points: str) -> str:
    """A class of these characters and ranges."""
    ranges = ("-".join(f"\\x{{{point}}}" for point in each.split("-")) for each in code_points.split())
    return f"[{''.join(ranges)}]"


_CJK = _one_of(_IDEOGRAPHS) + "+"
# Patterns that split one after the other what those before have left whole; none: that of GPT-2.
_PATTERNS: dict[str, tuple[str, ...]] = {
    "gpt-2": (),
    "smollm": (),
    "llama-bpe": (_LETTERS + r"|\p{N}{1,3}" + _REST,),
    "qwen2": (_LETTERS + r"|\p{N}" + _REST,),
    "deepseek-llm": (r"[\r\n]", rf"\s?{_one_of(_CASED)}+", rf"\s?{_one_of(_PUNCTUATION)}+", r"\s+$", _CJK),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK),
    "deepseek-v3": (
        r"\p{N}{1,3}", _one_of(_KANA) + "+",
        _MARKS + r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}  # fmt: skip
_SINGLE_DIGITS = ("smollm", "deepseek-llm", "deepseek-coder")
WAYS = frozenset(_PATTERNS)


def splitter(way: str) -> Any:
    """The pre-tokenizer that splits text into words in one of `WAYS`."""
    patterns = _PATTERNS[way]
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    if way in _SINGLE_DIGITS:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns))
    return pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
