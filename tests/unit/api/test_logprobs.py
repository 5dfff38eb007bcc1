"""Log probabilities of tokens in each API: with the token's bytes and the offset of its text."""

from types import SimpleNamespace
from typing import Any

from master.api.answers.collector import Collector
from master.api.answers.events import Ended, Event, TextPiece, TokenLogprob
from master.api.answers.formats import AnswerFormat
from master.api.answers.prepare import PreparedRequest
from master.api.openai.common import chat_logprobs, text_logprobs
from master.generation.answer import AnswerLimits
from master.generation.request import DraftedTokens, Sampled
from master.text.replay import Replay
from master.text.tokenizer import Tokenizer
from master.vocabulary.sampler import Logprobs
from tests.support.vocabularies import byte_level, llama_style

EMOJI = "\U0001f600".encode()
METER: Any = SimpleNamespace(first_token=lambda s: None, next_token=lambda s: None, over=lambda *a: None)


def said(tokenizer: Tokenizer, tokens: list[int]) -> tuple[str, list[TokenLogprob]]:
    """Return the text of an answer of these tokens, and the log probabilities of each token and one alternative."""
    events: list[Event] = []
    prepared = PreparedRequest([1], len(tokens), AnswerFormat())

    def deliver(what: Any) -> None:
        events.extend(what)

    heard = Collector(tokenizer, prepared, AnswerLimits(len(tokens)), Replay(), METER, deliver)
    heard.ticket = SimpleNamespace(at=0.0, first_admitted=0.0, cached=0, drafts=DraftedTokens())  # type: ignore[assignment]
    for token in tokens:
        heard.token(Sampled(None, token, 0.0, Logprobs(-1.0, ((token, -1.0), (token ^ 1, -2.0)))))  # type: ignore[arg-type]
    heard.ended(None)
    assert isinstance(events[-1], Ended)
    pieces = [event for event in events if isinstance(event, (TextPiece, Ended))]
    text = "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))
    return text, [one for piece in pieces for one in piece.logprobs]


def test_parts_of_a_character_have_bytes_of_their_own() -> None:
    text, tokens = said(Tokenizer(byte_level(), {}), list(b"a" + EMOJI + b"b"))
    assert text == "a\U0001f600b"
    chat = chat_logprobs(tokens)["content"]
    assert [bytes(one["bytes"]) for one in chat] == [bytes([byte]) for byte in b"a" + EMOJI + b"b"]
    assert [one["token"] for one in chat][:3] == ["a", "bytes:\\xf0", "bytes:\\x9f"]
    for one in chat:
        assert (one["token"], one["bytes"]) == (one["top_logprobs"][0]["token"], one["top_logprobs"][0]["bytes"])


def test_completions_have_every_token_and_where_its_text_begins() -> None:
    text, tokens = said(Tokenizer(byte_level(), {}), list(b"a" + EMOJI + b"bc"))
    found = text_logprobs(tokens)
    assert found["text_offset"] == [0, 1, 1, 1, 1, 2, 3]
    assert [text[at] for at in found["text_offset"]] == ["a", *["\U0001f600"] * 4, "b", "c"]
    for token, best in zip(found["tokens"], found["top_logprobs"], strict=True):
        assert len(best) == 2  # parts of characters do not fall together
        assert best[token] == -1.0


def test_a_character_that_stays_unfinished_takes_its_place() -> None:
    text, tokens = said(Tokenizer(byte_level(), {}), list(b"a\xf0\x9fb\x98c"))
    assert text == "a\ufffdb\ufffdc"
    assert [one.at for one in tokens] == [0, 1, 1, 2, 3, 4]


def test_the_token_that_was_drawn_is_always_among_the_best() -> None:
    drawn = TokenLogprob("c", b"c", -5.0, (("a", b"a", -0.1), ("b", b"b", -3.0), ("a", b"a", -4.0)))
    assert text_logprobs([drawn])["top_logprobs"] == [{"a": -0.1, "b": -3.0, "c": -5.0}]


def test_blanks_belong_to_their_tokens_and_offsets_to_the_text() -> None:
    text, tokens = said(Tokenizer(llama_style(("\u2581the", "\u2581cat", "s")), {}), [256, 257, 258])
    assert text == "the cats"  # the decoder drops the first blank
    assert [one.text for one in tokens] == [" the", " cat", "s"]
    assert [one.at for one in tokens] == [0, 3, 7]
