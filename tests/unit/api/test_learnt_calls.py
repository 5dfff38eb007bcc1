"""Call formats are learnt from templates with published marks, and from one with invented marks."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from master.api.answers.events import Piece, ReasoningPiece, TextPiece, ToolCall
from master.api.tools.families import ToolFamily, reasoning_tags
from master.api.tools.parser import NoTools
from master.api.tools.reasoning import ReasoningParser
from master.api.tools.typed import typed
from tests.support import call_examples
from tests.support.call_examples import EXAMPLES
from tests.support.call_templates import TEMPLATES, family, model_output

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "more": {"type": "object"},
        "some": {"type": "array"},
        "yes": {"type": "boolean"},
    },
}
TOOLS: list[dict[str, Any]] = [{"name": "get_weather", "parameters": SCHEMA}, {"name": "get"}, {"name": "get_we"}]
ALL = {"city": 'Rome "x" <b>\n  two', "days": 5, "more": {"k": [1, "a", True]}, "some": ["p", "q"], "yes": True}
CALLS: list[tuple[str, dict[str, Any]]] = [("get_weather", ALL), ("get", {}), ("get_weather", {"city": "5"})]


def parsed(
    family: ToolFamily, pieces: Sequence[str], tools: Sequence[dict[str, Any]] = TOOLS
) -> tuple[list[tuple[str, Any]], str]:
    parser = family.parser(tools)
    found: list[Piece] = [one for piece in pieces for one in parser.push(piece)]
    found += parser.flush()
    calls = [(one.name, json.loads(one.arguments)) for one in found if isinstance(one, ToolCall)]
    return calls, "".join(one.text for one in found if isinstance(one, TextPiece))


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_are_read_as_the_template_writes_them(name: str) -> None:
    learnt, traits = family(TEMPLATES[name])
    assert learnt.marks
    text = model_output(traits, CALLS)
    expected = (CALLS, "I look.")
    assert parsed(learnt, [text]) == expected
    assert parsed(learnt, list(text)) == expected
    for cut in range(len(text) + 1):
        assert parsed(learnt, [text[:cut], text[cut:]]) == expected


@pytest.mark.parametrize("name", EXAMPLES)
def test_published_calls_cut_at_every_place(name: str) -> None:
    learnt, _ = family(TEMPLATES[name])
    text = f"I look.\n{EXAMPLES[name]}"
    expected = (call_examples.CALLS, "I look.")
    assert parsed(learnt, list(text), call_examples.TOOLS) == expected
    for cut in range(len(text) + 1):
        assert parsed(learnt, [text[:cut], text[cut:]], call_examples.TOOLS) == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_cut_off_calls_and_unknown_tools_are_text(name: str) -> None:
    learnt, traits = family(TEMPLATES[name])
    text = model_output(traits, [("other_tool", {"city": "Rome"})])
    for pieces in ([text], list(text)):
        calls, said = parsed(learnt, pieces)
        assert calls == []
        assert "".join(said.split()) == "".join(text.split())
    whole = model_output(traits, CALLS[:1])
    calls, said = parsed(learnt, list(whole[: whole.index("Rome") + 4]))
    assert calls == []
    assert said == whole[: whole.index("Rome") + 4]


def test_calls_without_the_first_tag_are_read() -> None:
    """Qwen3-Coder often leaves the first tag out."""
    learnt, _ = family(TEMPLATES["Qwen3-Coder"])
    text = "<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
    for pieces in ([text], list(text)):
        assert parsed(learnt, pieces) == ([("get_weather", {"city": "Rome"})], "")


def test_a_value_may_contain_its_own_end() -> None:
    learnt, traits = family(TEMPLATES["Qwen3-Coder"])
    given = {"city": "a\n</parameter>\nb"}
    assert parsed(learnt, list(model_output(traits, [("get_weather", given)])))[0] == [("get_weather", given)]


@pytest.mark.parametrize(
    ("raw", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("5.0", {"type": "integer"}, 5),
        ("2.5", {"type": "number"}, 2.5),
        ("True", {"type": "boolean"}, True),
        ("null", {"type": ["string", "null"]}, None),
        ("Rome", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "Rome"),
        ("{'a': 1}", {"type": "object"}, {"a": 1}),
        ("[1]", {}, [1]),
        ('"a"', {}, '"a"'),
        ("7", {"$ref": "#/$defs/word"}, "7"),
        ("many", {"type": "integer"}, "many"),
        ("1", {"enum": ["1", "2"]}, "1"),
    ],
)
def test_values_are_typed_by_their_schema(raw: str, schema: Any, value: Any) -> None:
    found = typed(raw, schema, {"$defs": {"word": {"type": "string"}}})
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("<|channel>thought <channel|>", "<|channel>thought\nHm.\n<channel|>Yes."),
        ("<seed:think>", "<seed:think>Hm.</seed:think>\nYes."),
        ("<thought>", "<thought>\nHm.\n</thought>\nYes."),
        ("<|START_THINKING|>", "<|START_THINKING|>Hm.<|END_THINKING|>Yes."),
        ("{{ m.content.split('</think>') }}", "<think>\nHm.\n</think>\n\nYes."),
    ],
)
def test_reasoning_between_other_tags(template: str, text: str) -> None:
    tags = reasoning_tags(template)
    assert tags
    for cut in range(len(text) + 1):
        parser = ReasoningParser(tags, False, NoTools())
        found = [*parser.push(text[:cut]), *parser.push(text[cut:]), *parser.flush()]
        assert "".join(one.text for one in found if isinstance(one, ReasoningPiece)) == "Hm."
        assert "".join(one.text for one in found if isinstance(one, TextPiece)) == "Yes."
