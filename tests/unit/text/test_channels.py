"""Harmony: reasoning, calls and answers of gpt-oss are separated, however the text is cut into pieces."""

import re
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer

from master.api.answers.events import Piece, ReasoningPiece, TextPiece, ToolCall
from master.api.tools.families import SPELLED as SEEN
from master.api.tools.families import family_of
from master.api.tools.harmony import HarmonyParser
from master.api.tools.parser import NoTools
from master.generation.answer import AnswerLimits, answer
from master.generation.thread import EngineThread
from master.text.channels import SPELLED, ShownChannels, has_channels, has_recipients
from master.text.tokenizer import Tokenizer
from master.vocabulary.sampler import Sampler, Sampling
from tests.support import models
from tests.support.generating import ScriptedThread
from tpi.pack.builder.tokens import from_directory

_TOKENS = re.compile("|".join(map(re.escape, SPELLED)) + r"|[^<]|<")
THOUGHT = "<|channel|>analysis<|message|>Paris, I think: 1 < 2.<|end|><|start|>assistant"
ANSWER = "<|channel|>final<|message|>It is Paris."
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}'
RECIPIENTS = " to=self<|message|>Paris, I think.<|eom|><|start|>assistant to=user<|message|>It is Paris."
OTHER = '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}'


def pieces(text: str) -> list[Piece]:
    """Return the parser's output for `text`, fed by characters and control tokens, with neighbouring parts joined."""
    parser, found = HarmonyParser(NoTools()), list[Piece]()
    for token in _TOKENS.findall(text):
        found += parser.push(token)
    joined: list[Piece] = []
    for piece in found + parser.flush():
        last = joined[-1] if joined else None
        if isinstance(piece, TextPiece) and isinstance(last, TextPiece):
            joined[-1] = TextPiece(last.text + piece.text)
        elif isinstance(piece, ReasoningPiece) and isinstance(last, ReasoningPiece):
            joined[-1] = ReasoningPiece(last.text + piece.text)
        else:
            joined.append(piece)
    return joined


def shown(tokens: list[str]) -> tuple[str, str]:
    """Return the text that users see, and the part of it that is the answer."""
    channels = ShownChannels()
    text = "".join(map(channels.push, tokens)) + channels.flush()
    return text, channels.said


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (THOUGHT + ANSWER, [ReasoningPiece("Paris, I think: 1 < 2."), TextPiece("It is Paris.")]),
        (ANSWER, [TextPiece("It is Paris.")]),
        (RECIPIENTS, [ReasoningPiece("Paris, I think."), TextPiece("It is Paris.")]),
        (THOUGHT + CALL, [ReasoningPiece("Paris, I think: 1 < 2."), ToolCall("weather", '{"city": "Paris"}')]),
        (CALL + "<|call|>" + OTHER, [ToolCall("weather", f'{{"city": "{city}"}}') for city in ("Paris", "Rome")]),
        (OTHER.removeprefix("<|start|>assistant"), [ToolCall("weather", '{"city": "Rome"}')]),
        ("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + CALL,
         [TextPiece("I look."), ToolCall("weather", '{"city": "Paris"}')]),
        ("<|channel|>commentary to=functions.weather<|message|>Paris", [TextPiece("Paris")]),
        ("no markers at all", [TextPiece("no markers at all")]),
        ("to", [TextPiece("to")]),
        ("<|channel|>analysis<|message|>cut off", [ReasoningPiece("cut off")]),
        ("<|channel|>ana", []),
        ("", []),
    ],
)  # fmt: skip
def test_channels(text: str, expected: list[Piece]) -> None:
    assert pieces(text) == expected


def test_people_see_thinking_between_tags() -> None:
    tokens = _TOKENS.findall(THOUGHT + ANSWER)
    assert shown(tokens) == ("<think>\nParis, I think: 1 < 2.\n</think>\n\nIt is Paris.", "It is Paris.")
    assert shown(_TOKENS.findall("<|channel|>analysis<|message|>cut")) == ("<think>\ncut\n</think>\n\n", "")
    assert shown(["plain ", "text"]) == ("plain text", "plain text")


@given(st.lists(st.sampled_from([*SPELLED, "analysis", "final", " to=functions.f", "{}", "word", " "]), max_size=12))
@settings(max_examples=200, deadline=None)
def test_nothing_breaks_it(tokens: list[str]) -> None:
    """No control token is ever shown, and pieces of any size give the same."""
    text, said = shown(tokens)
    assert not any(marker in text for marker in ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>"))
    assert text.endswith(said) or "<think>" in text
    assert shown(_TOKENS.findall("".join(tokens))) == (text, said)
    assert shown(["".join(tokens)]) == (text, said)


@pytest.mark.parametrize("cut", [0, 30, 90, 150, 400])
def test_a_call_of_muse_glimmer_names_its_tool_as_the_recipient(cut: int) -> None:
    text = (
        " to=self<|message|>Let me look.<|eom|><|start|>assistant to=weather.get<|message|><atem:function_calls>\n"
        '<atem:invoke name="weather.get">\n<atem:parameter name="city">Paris</atem:parameter>\n'
        '<atem:parameter name="days">5</atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
    )
    properties = {"city": {"type": "string"}, "days": {"type": "integer"}}
    tools = [{"name": "weather.get", "parameters": {"type": "object", "properties": properties}}]
    parser = HarmonyParser(family_of(text).parser(tools))
    found = [*parser.push(text[:cut]), *parser.push(text[cut:]), *parser.flush()]
    assert "".join(piece.text for piece in found if isinstance(piece, ReasoningPiece)) == "Let me look."
    calls = [piece for piece in found if not isinstance(piece, ReasoningPiece)]
    assert calls == [ToolCall("weather.get", '{"city": "Paris", "days": 5}')]


def test_templates_and_tokens() -> None:
    assert has_channels("{{ '<|channel|>final<|message|>' }}")
    assert has_recipients("{{ '<|start|>assistant to=self<|message|>' }}")
    assert not has_recipients("{{ '<|start|>assistant<|channel|>final<|message|>' }}")
    assert not has_channels("<|im_start|>")
    assert not has_channels(None)
    assert set(SPELLED) <= set(SEEN)


@pytest.fixture
def harmonious(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    """Return the tiny tokenizer with the control tokens of Harmony, as in a pack."""
    template = "{{ '<|start|>user<|message|>' + messages[0].content + '<|end|>' }}<|start|>assistant"
    monkeypatch.setattr(models, "SPECIAL", (*models.SPECIAL, *SPELLED))
    monkeypatch.setattr(models, "TEMPLATE", template + "{% if false %}<|channel|><|return|><|call|>{% endif %}")
    models.write_tokenizer(tmp_path)
    info = from_directory(tmp_path, {}, models.VOCAB, tmp_path)
    return Tokenizer(FastTokenizer.from_file(str(tmp_path / "tokenizer.json")), info)


def test_an_answer_ends_with_its_last_message(harmonious: Tokenizer) -> None:
    tokens = harmonious.encode(f"{THOUGHT}{ANSWER}<|return|>never", special=False)
    names = {harmonious.spelling([token]) for token in harmonious.eos_ids}
    assert names == {"<|im_end|>", "<|return|>", "<|call|>"}
    shown: list[str] = []
    engine = cast(EngineThread, ScriptedThread(tokens))
    result = answer(engine, harmonious, [1, 2, 3], Sampler(Sampling()), AnswerLimits(200), shown.append)
    assert (result.said, result.finish_reason) == ("It is Paris.", "stop")
    assert result.text == "".join(shown) == "<think>\nParis, I think: 1 < 2.\n</think>\n\nIt is Paris."
