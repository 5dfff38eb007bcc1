"""Token ids and text: a user's text never becomes control tokens, and no part of an answer is lost at its end."""

import re
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer

from master.generation.answer import AnswerLimits, answer
from master.generation.thread import EngineThread
from master.text.tokenizer import Tokenizer, TokenStream
from master.vocabulary.sampler import Sampler, Sampling
from tests.support.generating import ScriptedThread
from tests.support.models import SPECIAL
from tests.support.vocabularies import byte_fallback, byte_level
from tpi.errors import UsageError
from tpi.pack.reader import Pack


@pytest.fixture(scope="module")
def tokenizer(tiny_pack: Callable[..., Pack]) -> Tokenizer:
    return Tokenizer.load(tiny_pack("llama"))


def controls(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    names = {tokenizer.encode(name, special=False)[0]: name for name in SPECIAL}
    return [names[token] for token in ids if token in names]


@given(st.lists(st.sampled_from([*SPECIAL, "Hello", " ", "\n", "<|im_", "end|>", "\U000f0000"]), max_size=8))
@settings(deadline=None)
def test_control_tokens_come_from_the_template_alone(tokenizer: Tokenizer, parts: list[str]) -> None:
    typed = "".join(parts)
    ids = tokenizer.encode_chat([{"role": "system", "content": typed}, {"role": "user", "content": typed}])
    expected = ["<|im_start|>", "<|im_end|>"] * 2 + ["<|im_start|>"]
    assert controls(tokenizer, ids) == expected
    text = tokenizer._fast.decode(ids, skip_special_tokens=False)
    assert text == tokenizer.render([{"role": "system", "content": typed}, {"role": "user", "content": typed}])


def test_ordinary_text_is_encoded_as_the_whole_rendering(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "\n The capital of France? \n"}]
    assert tokenizer.encode_chat(messages) == tokenizer.encode(tokenizer.render(messages), special=False)


def test_raw_text_may_spell_control_tokens(tokenizer: Tokenizer) -> None:
    assert controls(tokenizer, tokenizer.encode("<|im_start|>a<|im_end|>")) == ["<|im_start|>", "<|im_end|>"]


BYTES = st.text("aé你😀\ufffd", max_size=8).map(str.encode) | st.binary(max_size=12)


def streamed(fast: FastTokenizer, ids: list[int]) -> list[str]:
    stream = TokenStream(fast)
    return [*(stream.push(token) for token in ids), stream.flush()]


@given(BYTES)
@settings(deadline=None)
def test_streamed_text_is_the_text_of_all_tokens(data: bytes) -> None:
    pieces = streamed(byte_level(), list(data))
    text = "".join(pieces)
    assert text == data.decode(errors="replace")


@given(BYTES)
@example("\ufffd\ufffd\ufffd\ufffd\ufffd😀end".encode())
@settings(deadline=None)
def test_streamed_text_of_byte_tokens_loses_no_character(data: bytes) -> None:
    text = "".join(streamed(byte_fallback(), list(data)))
    try:
        assert text == data.decode()
    except UnicodeDecodeError:
        assert re.sub("\ufffd+", "", text).startswith(data.decode(errors="replace").split("\ufffd")[0])
        assert "\ufffd" in text


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    pieces = streamed(byte_level(), list("a你".encode()[:-1]))
    assert pieces == ["a", "", "", "\ufffd"]


def test_a_final_replacement_character_is_shown() -> None:
    assert "".join(streamed(byte_level(), list("end\ufffd".encode()))) == "end\ufffd"


@pytest.mark.parametrize("stops", [(), ("zzz",), ("\ufffd",)])
def test_an_answer_ends_with_what_the_decoder_holds(stops: tuple[str, ...]) -> None:
    shown: list[str] = []
    tokens = list("end\ufffd".encode())
    engine = cast(EngineThread, ScriptedThread(tokens))
    tokenizer, limits = Tokenizer(byte_level(), {}), AnswerLimits(9, stops)
    result = answer(engine, tokenizer, [1], Sampler(Sampling()), limits, shown.append)
    assert "".join(shown) == result.text == ("end" if "\ufffd" in stops else "end\ufffd")


def test_bytes_that_are_no_character_are_shown_as_they_come() -> None:
    pieces = streamed(byte_level(), [0xFF] * 64)
    assert "".join(pieces) == "\ufffd" * 64
    assert any(pieces[:32])


def test_seed_minus_one_is_random() -> None:
    logits = np.zeros(1000, np.float32)

    def draw(seed: int | None) -> list[int]:
        sampler = Sampler(Sampling(temperature=1, top_k=0, min_p=0, top_p=1, seed=seed))
        return [sampler.sample(logits) for _ in range(8)]

    assert draw(7) == draw(7)
    assert draw(-1) != draw(-1)
    with pytest.raises(UsageError, match="--seed"):
        draw(-2)
