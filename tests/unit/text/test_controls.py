"""Control tokens come only from the template, whatever the template or the tokenizer does with a text."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from itertools import groupby
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from master.text.controls import Controls
from master.text.templates.traits import Traits
from master.text.tokenizer import Tokenizer

START, END, THINK, CALL, USER = "<|im_start|>", "<|im_end|>", "</think>", "<tool_call>", "<\uff5cUser\uff5c>"
SPECIAL, PLAIN = (START, END), (THINK, CALL, USER)  # the latter are added tokens that are not special
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ BODY }}<|im_end|>\n{% endfor %}"
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{% if mode %}{{ mode }}{% endif %}"
    "<|im_start|>assistant\n</think>"
)
ALPHABET = sorted(
    {
        *"".join((*SPECIAL, *PLAIN)),
        *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ\n .,:;'\"{}[]()&#39\uff1c\uff1e\\/_-",
    }
)


def bytes_of() -> FastTokenizer:
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    fast = FastTokenizer(models.BPE(letters, [], ignore_merges=True))
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return fast


def prefixed() -> FastTokenizer:
    fast = bytes_of()
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return fast


def composed() -> FastTokenizer:
    """Return a tokenizer that replaces full-width brackets by plain ones before it finds tokens."""
    fast = bytes_of()
    fast.normalizer = normalizers.NFKC()
    return fast


def pieces() -> FastTokenizer:
    """Return a SentencePiece tokenizer with byte fallback that puts a blank before each text."""
    vocab = {
        piece: number
        for number, piece in enumerate(["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *ALPHABET])
    }
    fast = FastTokenizer(models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return fast


def unigram() -> FastTokenizer:
    """Return a tokenizer whose own vocabulary has every token, with control tokens as the likeliest."""
    scores = [("<unk>", 0.0), *((token, 0.0) for token in (*SPECIAL, *PLAIN)), *((one, -5.0) for one in ALPHABET)]
    return FastTokenizer(models.Unigram(scores, unk_id=0))


def words() -> FastTokenizer:
    """Return a tokenizer of words, some of which are control tokens."""
    fast = FastTokenizer(
        models.WordLevel({"<unk>": 0, **{one: at + 1 for at, one in enumerate((*SPECIAL, *PLAIN, "a"))}}, "<unk>")
    )
    fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s"), "isolated")
    return fast


KINDS: Mapping[str, Callable[[], FastTokenizer]] = {
    "bytes": bytes_of, "bytes after a blank": prefixed, "normalized": composed, "pieces": pieces, "unigram": unigram,
    "words": words,
}  # fmt: skip
FLAGS: Mapping[str, dict[str, bool]] = {
    "bare": {},
    "greedy": {"lstrip": True, "rstrip": True},
    "normal": {"normalized": True},
}


def make(kind: str, flags: str) -> FastTokenizer:
    fast = KINDS[kind]()
    given: dict[str, Any] = {"normalized": False, **FLAGS[flags]}
    fast.add_special_tokens(
        [AddedToken(token, special=True, **given) for token in (*SPECIAL, "<unk>")][
            : 3 if kind in ("pieces", "unigram", "words") else 2
        ]
    )
    fast.add_tokens([AddedToken(token, special=False, **given) for token in PLAIN])
    return fast


def controls(fast: FastTokenizer, ids: list[int]) -> list[str]:
    found = {fast.token_to_id(token): token for token in (*SPECIAL, *PLAIN)}
    return [found[token] for token in ids if token in found]


PIECE = st.sampled_from(
    [
        *SPECIAL,
        *PLAIN,
        "<|im_",
        "end|>",
        "</",
        "think>",
        "a",
        " ",
        "\n",
        "\uff1c|im_end|\uff1e",
        "<unk>",
        "<0x0A>",
        "\u4f60",
        "\U000f0000",
        "<|im_end|",
        ">",
    ]
)
TYPED = st.lists(PIECE, max_size=6).map("".join)


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("kind", KINDS)
@given(st.lists(st.tuples(st.booleans(), TYPED), max_size=6))
@example([(True, "<|im_end|"), (False, ""), (True, ">")])
@example([(False, "<"), (True, "|im_end|>")])
@example([(True, "<|im_"), (False, "e"), (True, "nd|>")])
@example([(True, "<|im_end|"), (False, ">")])
@settings(deadline=None, max_examples=40)
def test_control_tokens_are_those_that_are_trusted(kind: str, flags: str, parts: list[tuple[bool, str]]) -> None:
    fast = make(kind, flags)
    parts = [(trusted, part) for trusted, part in parts if part]  # an empty part does not divide a run
    text = "".join(part for _, part in parts)
    marks = b"".join(bytes([trusted]) * len(part) for trusted, part in parts)
    ids = Controls(fast, TEMPLATE).encode(text, marks)
    expected = []
    runs = ["".join(part for _, part in run) for trusted, run in groupby(parts, key=lambda part: part[0]) if trusted]
    for run in runs:
        expected += controls(fast, list(fast.encode(run, add_special_tokens=False).ids))
    if all(trusted for trusted, _ in parts) or not any(trusted for trusted, _ in parts):
        assert controls(fast, ids) == expected
    else:  # a token that stands beside typed characters may be found at another place than in its run alone
        assert len(controls(fast, ids)) <= len(expected)


@pytest.mark.parametrize("kind", ["bytes", "normalized"])
@given(TYPED)
@settings(deadline=None, max_examples=60)
def test_no_character_of_typed_text_is_lost(kind: str, typed: str) -> None:
    fast = make(kind, "bare")
    ids = Controls(fast, TEMPLATE).encode(typed, bytes(len(typed)))
    normal = fast.normalizer.normalize_str(typed) if fast.normalizer is not None else typed
    assert fast.decode(ids, skip_special_tokens=False) == normal


BODIES = (
    "m.content",
    "m.content.split('</think>')[-1]",
    "m.content.split('<|im_end|>')[0]",
    "m.content | upper | lower",
    "m.content.replace('<', '<')",
    "m.content | tojson",
    "m.content | trim",
    "m.content[1:]",
    "m.content[::-1][::-1]",
    "m.content.split('|') | join('|')",
    "'%s' % m.content",
    "'{}'.format(m.content)",
    "m.content * 2",
    "'<|im_' ~ m.content",
    "(m.content ~ '<|im_end|>').split('<|im_end|>')[0]",
    "m.content | list | join",
    "m.content.partition('</think>') | join",
    "'<|' + m.content + '|>'",
    "m.content.strip('<>')",
    "m.name ~ m.tool_calls | tojson",
    "m.reasoning_content ~ m.content",
    "m.tool_calls[0].function.arguments.items() | map('join') | join",
    "m.content.lstrip('\\n').split('</think>')[0].split('<think>')[-1]",
    "'im_end' if '</think>' in m.content else 'im_start'",
)


@pytest.fixture(scope="module", params=BODIES)
def tokenizer(request: pytest.FixtureRequest) -> Iterator[Tokenizer]:
    info = {"chat_template": TEMPLATE.replace("BODY", request.param), "eos_token": END}
    with closing(Tokenizer(make("bytes", "bare"), info)) as tokenizer:
        all_shown = Traits(lambda messages, names: json.dumps([messages, names]).replace("null", "None"))
        tokenizer.__dict__["_traits"] = all_shown  # the messages go to the template as they are
        yield tokenizer


@given(TYPED)
@settings(deadline=None, max_examples=20)
def test_nothing_that_a_caller_sends_becomes_a_control_token(tokenizer: Tokenizer, typed: str) -> None:
    call = {"id": typed, "type": "function", "function": {"name": typed, "arguments": {typed: typed, "role": typed}}}
    message = {
        "role": "assistant", "content": typed, "name": typed, "reasoning_content": typed, "tool_calls": [call],
    }  # fmt: skip
    names = {"tools": [{"type": "function", "function": {"name": typed, "role": typed}}], "mode": typed}
    ids = tokenizer.encode_chat([message, {**message, "role": typed}], {}, names)
    expected = [START, END] * 2 + [CALL, START, THINK]
    assert controls(tokenizer._fast, ids) == expected
    asked = [message, message]
    replayed = tokenizer.encode_chat(asked, {0: [7, 8]}, names)
    assert [token for token in controls(tokenizer._fast, replayed) if token in (START, END)] == [START, END] * 2 + [
        START
    ]


def test_a_models_answer_stands_as_its_tokens_or_as_text() -> None:
    info = {"chat_template": TEMPLATE.replace("BODY", "m.content"), "eos_token": END}
    asked = [{"role": "assistant", "content": "ab<|im_end|>"}]
    with closing(Tokenizer(make("bytes", "bare"), info)) as tokenizer:
        (end,) = tokenizer.encode(END, special=False)
        assert tokenizer.encode_chat(asked, {0: [end, 5, 6, end]})[11:15] == [end, 5, 6, end]
    info = {"chat_template": TEMPLATE.replace("BODY", "m.content | tojson ~ m.content"), "eos_token": END}
    with closing(Tokenizer(make("bytes", "bare"), info)) as tokenizer:  # written twice: it is text
        assert tokenizer.encode_chat(asked, {0: [end]}) == tokenizer.encode_chat(asked)


def test_without_a_template_messages_are_text() -> None:
    fast = make("bytes", "bare")
    tokenizer = Tokenizer(fast, {})
    assert controls(fast, tokenizer.encode_chat([{"role": "user", "content": START + USER}])) == []
    assert controls(fast, tokenizer.encode_text(START + USER)) == []
    assert controls(fast, tokenizer.encode(START)) == [START]


def test_a_template_cut_at_a_spelled_token_keeps_only_its_own() -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.content.split('</think>')[-1] }}<|im_end|>{% endfor %}"
    with closing(Tokenizer(make("bytes", "bare"), {"chat_template": template})) as tokenizer:
        ids = tokenizer.encode_chat([{"role": "user", "content": "a</think>b<|im_end|>c"}])
        start, end = map(tokenizer._fast.token_to_id, SPECIAL)
        assert (ids[0], ids[-1]) == (start, end)
        assert not {start, end} & {*ids[1:-1]}
        assert tokenizer._fast.decode(ids[1:-1]) == "b<|im_end|>c"
