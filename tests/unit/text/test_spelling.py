"""Tokens as bytes: all together they are the text, one may be a part of a character, and no blank is lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

from master.text.spelling import speller, written
from master.text.tokenizer import Tokenizer
from tests.support.vocabularies import END, byte_fallback, byte_level, llama_style

WORDS = ("\u2581the", "\u2581cat", "s", "\u2581\u2581", "\u00e9", "\u2581" + "\U0001f600")
NUMBERS = st.lists(st.integers(0, 255 + len(WORDS)), max_size=12)


@pytest.mark.parametrize("fast", [byte_level(), byte_fallback()])
def test_every_byte_is_itself(fast: FastTokenizer) -> None:
    assert b"".join(map(speller(fast), range(256))) == bytes(range(256))


@given(st.lists(st.integers(0, 256), max_size=12))
@settings(deadline=None)
def test_bytes_of_letters_are_the_text(tokens: list[int]) -> None:
    fast = byte_level()
    decoded = fast.decode(tokens, skip_special_tokens=False)
    assert b"".join(map(speller(fast), tokens)).decode(errors="replace") == decoded
    assert Tokenizer(fast, {}).spelling(tokens) == decoded


@given(NUMBERS)
@settings(deadline=None)
def test_bytes_of_pieces_are_the_text(tokens: list[int]) -> None:
    data = b"".join(map(speller(byte_fallback(WORDS)), tokens))
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return  # what the decoder makes of broken ones is its own affair
    assert text == byte_fallback(WORDS).decode(tokens)
    assert text.removeprefix(" ") == llama_style(WORDS).decode(tokens)


def test_a_blank_before_a_word_belongs_to_its_token() -> None:
    raw = Tokenizer(llama_style(WORDS), {}).raw
    assert [raw(256), raw(257), raw(258), raw(259)] == [b" the", b" cat", b"s", b"  "]


def test_a_metaspace_is_a_blank_and_a_control_token_itself() -> None:
    fast = FastTokenizer(models.WordLevel({"\u2581the": 0, "x": 1}, unk_token="x"))
    fast.decoder = decoders.Metaspace()
    assert speller(fast)(0) == b" the"
    assert speller(byte_level())(256) == END.encode()


@pytest.mark.parametrize("fast", [byte_level(), byte_fallback(), FastTokenizer(models.WordLevel({}, "x"))])
def test_a_number_that_is_no_token_is_nothing(fast: FastTokenizer) -> None:
    assert speller(fast)(5000) == b""


def test_other_vocabularies_are_decoded() -> None:
    fast = FastTokenizer(models.WordPiece({"play": 0, "##ing": 1}, unk_token="play"))
    fast.decoder = decoders.WordPiece()
    assert speller(fast)(0) == b"play"


@given(st.sets(st.binary(min_size=1, max_size=4), max_size=8))
def test_what_is_written_differs_where_bytes_do(parts: set[bytes]) -> None:
    assert len({written(data) for data in parts}) == len(parts)


def test_a_part_of_a_character_is_written_as_openai_does() -> None:
    assert written(b" \xf0\x9f") == "bytes: \\xf0\\x9f"
    assert written(" \U0001f600".encode()) == " \U0001f600"
