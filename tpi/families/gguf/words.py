"""The ways in which byte-level vocabularies split text into words, by their name in `tokenizer.ggml.pre`.

The names are llama.cpp's. The patterns are taken from the tokenizer.json, or the tiktoken pattern, of the models that
use each name.
"""

from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_LINES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _LINES
# The letters that DeepSeek's first tokenizers join into words: those with an upper and a lower case in the Unicode
# version of that time. They are code points, since normalising this file would change some of the characters.
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
    """Return a character class of these code points and ranges of code points."""
    ranges = ("-".join(f"\\x{{{point}}}" for point in each.split("-")) for each in code_points.split())
    return f"[{''.join(ranges)}]"


_CJK = _one_of(_IDEOGRAPHS) + "+"


def _by_case(of: str, contractions: str) -> str:
    """Return a pattern of words that end where an upper-case letter follows a lower-case one.

    `of` restricts the letters; `contractions` is a pattern that may follow a word.
    """
    upper, lower = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{of}]", rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{of}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return f"{before}{upper}*{lower}+{contractions}|{before}{upper}+{lower}*{contractions}"


@dataclass(frozen=True)
class WordRules:
    """One way of splitting a text into words."""

    patterns: tuple[str, ...] = ()  # each splits the pieces that the one before has left; empty: GPT-2's pattern
    digits: bool = False  # each digit is a word
    tokens_first: bool = False  # a word that is a token becomes that token without merges
    nfc: bool = False  # text is normalised to NFC first
    bos: bool = False  # default of add_bos_token: a text begins with the beginning-of-sequence token

    def splitter(self) -> Any:
        """Return a pre-tokenizer of the library `tokenizers` that splits texts in this way."""
        steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        if self.digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.patterns))
        return pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]


_OF_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_OF_GPT4 = _LETTERS + r"|\p{N}{1,3}" + _REST  # tiktoken's cl100k_base
_OF_QWEN = _LETTERS + r"|\p{N}" + _REST
_OF_GPT4O = (  # tiktoken's o200k_base
    _by_case("", _CONTRACTIONS + "?") + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _LINES
)
_OF_DEEPSEEK = (
    r"\p{N}{1,3}", _one_of(_KANA) + "+", _MARKS + r"| ?[\p{P}\p{S}]+[\r\n]*" + _LINES,
)  # fmt: skip
_OF_EXAONE = (  # letters with one space between them are one word
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_GROUPS: tuple[tuple[str, WordRules], ...] = (
    ("default", WordRules((r"[\p{P}\$\+<=>\^~\|]+", _OF_GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
    ("falcon", WordRules((r"[\p{P}\$\+<=>\^~\|`]+", _OF_GPT2, r"[0-9][0-9][0-9]"))),
    ("gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 trillion granite-docling", WordRules()),
    ("opt", WordRules(bos=True)),  # not a name of llama.cpp: GPT-2's words after the token that begins a text
    ("olmo mpt", WordRules(nfc=True)),  # GPT-NeoX's
    ("smollm starcoder refact codeshell exaone minerva-7b mellum2", WordRules(digits=True)),
    ("command-r", WordRules(digits=True, nfc=True)),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        WordRules((_OF_GPT4,), tokens_first=True, bos=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe", WordRules((_OF_GPT4,))),
    ("glm4", WordRules((_OF_GPT4,), tokens_first=True)),
    ("minicpm5", WordRules((r"\p{N}{1,3}", _LETTERS + r"|\p{N}+" + _REST), tokens_first=True)),
    ("qwen2", WordRules((_OF_QWEN,), nfc=True)),
    ("deepseek-r1-qwen megrez kormo f2llmv2 stablelm2 hunyuan solar-open grok-2", WordRules((_OF_QWEN,))),
    (
        "qwen35",
        WordRules(
            (_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _LINES,),
            nfc=True,
        ),
    ),
    ("exaone-moe", WordRules((_OF_EXAONE,))),
    ("seed-coder", WordRules((_LETTERS + r"|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + _LINES,))),
    (
        "tekken",
        WordRules((_by_case("", "") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _LINES,), tokens_first=True, bos=True),
    ),
    ("gpt-4o llama4 kanana2 minimax-m2", WordRules((_OF_GPT4O,))),
    (
        "kimi-k2",  # ideographs are separate from other letters
        WordRules((r"[\p{Han}]+|" + _by_case(r"&&[^\p{Han}]", _CONTRACTIONS + "?") + r"|\p{N}{1,3}" + _REST,)),
    ),
    (
        "deepseek-llm",
        WordRules((r"[\r\n]", rf"\s?{_one_of(_CASED)}+", rf"\s?{_one_of(_PUNCTUATION)}+", r"\s+$", _CJK), digits=True),
    ),
    ("deepseek-coder", WordRules((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK), digits=True)),
    ("deepseek-v3 hunyuan-dense joyai-llm", WordRules(_OF_DEEPSEEK)),
)
WORDS = {name: words for names, words in _GROUPS for name in names.split()}
