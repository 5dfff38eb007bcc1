"""Each family's published output format, parsed to text and calls, however the output is cut into pieces."""

import json
from collections.abc import Callable, Iterator
from itertools import groupby, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from master.api.answers.events import Piece, ReasoningPiece, TextPiece, ToolCall
from master.api.tools.bare import BareParser
from master.api.tools.families import FUNCTION, HERMES, JSON, LLAMA, MISTRAL, family_of, reasoning_tags
from master.api.tools.learnt import LearntParser
from master.api.tools.parser import NoTools, ToolParser
from master.api.tools.reasoning import TAGS, ReasoningParser
from master.text.templates.calls import ANY, CallMarks

NAMES = ("get_current_temperature", "get_weather", "spotify_trending_songs", "multiply")
TOOLS = [{"name": name} for name in NAMES]
MISTRAL_2025 = CallMarks("json", opening="[TOOL_CALLS]", name_end=f"[CALL_ID]{ANY}[ARGS]")
Make = Callable[[], ToolParser]


def call(name: str, **arguments: object) -> ToolCall:
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


MAKE: dict[str, Make] = {
    "hermes": lambda: HERMES.parser(TOOLS),
    "function": lambda: FUNCTION.parser(TOOLS),
    "mistral": lambda: MISTRAL.parser(TOOLS),
    "mistral 2025": lambda: LearntParser(MISTRAL_2025, TOOLS),
    "bare": lambda: BareParser(NAMES),
    "thinking": lambda: ReasoningParser(TAGS[0], False, HERMES.parser(TOOLS)),
    "begun": lambda: ReasoningParser(TAGS[0], True, NoTools()),
}

PARIS, ROME = call("get_weather", city='Paris {"}'), call("get_weather", city="Rome")
CASES: dict[str, tuple[str, str, list[Piece]]] = {
    # https://huggingface.co/NousResearch/Hermes-2-Pro-Llama-3-8B, https://qwen.readthedocs.io (function calling)
    "hermes": (
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris {\\"}"}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"city": "Rome"}, "name": "get_weather"}\n</tool_call>',
        [PARIS, ROME],
    ),
    "hermes after text": (
        "hermes",
        'I look.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>',
        [TextPiece("I look."), ROME],
    ),
    "hermes cut off before its end": (
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n',
        [ROME],
    ),
    # https://huggingface.co/microsoft/Phi-4-mini-instruct, whose models write both
    "Phi-4 mini": (
        "bare",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Rome"}}]<|/tool_call|>',
        [ROME],
    ),
    "Phi-4 mini, as a function": ("bare", 'functools[{"name": "get_weather", "arguments": {"city": "Rome"}}]', [ROME]),
    "a text of functools": ("bare", "functools is a module", [TextPiece("functools is a module")]),
    "hermes broken": ("hermes", "<tool_call>\n{oops\n</tool_call>", [TextPiece("<tool_call>\n{oops\n</tool_call>")]),
    "hermes of a tool that is not there": (
        "hermes",
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        [TextPiece('<tool_call>{"name": "rm", "arguments": {}}</tool_call>')],
    ),
    "hermes, nearly": ("hermes", "a <tool_cat> and <", [TextPiece("a <tool_cat> and <")]),
    # https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1
    "llama": ("bare", '{"name": "get_weather", "parameters": {"city": "Rome"}}', [ROME]),
    "llama with its tag": ("bare", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Rome"}}', [ROME]),
    "llama, two": (
        "bare",
        '{"name": "get_weather", "parameters": {"city": "Paris {\\"}"}}; '
        '{"name": "get_weather", "parameters": {"city": "Rome"}}',
        [PARIS, ROME],
    ),
    "llama's own functions": (
        "function",
        '<function=spotify_trending_songs>{"n": "5"}</function>',
        [ToolCall("spotify_trending_songs", '{"n": "5"}')],
    ),
    # https://docs.mistral.ai, mistral-common's tokenizers v3, v7 and v11
    "mistral": (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris {\\"}"}}, '
        '{"name": "get_weather", "arguments": {"city": "Rome"}}]',
        [PARIS, ROME],
    ),
    "mistral after text": (
        "mistral",
        'Let me see.[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Rome"}, "id": "VvvODy9mT"}]',
        [TextPiece("Let me see."), ROME],
    ),
    "mistral since 2025": (
        "mistral 2025",
        '[TOOL_CALLS]get_weather[CALL_ID]VvvODy9mT[ARGS]{"city": "Rome"}[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}'
        '[TOOL_CALLS]multiply{"a": 2}',
        [ROME, ROME, call("multiply", a=2)],
    ),
    "mistral broken": ("mistral", "[TOOL_CALLS] what", [TextPiece("[TOOL_CALLS] what")]),
    # generic
    "generic": ("bare", '{"name": "multiply", "arguments": {"a": 2}}', [call("multiply", a=2)]),
    "generic in a fence": ("bare", '```json\n{"tool": "multiply", "args": {"a": 2}}\n```', [call("multiply", a=2)]),
    "generic, as OpenAI writes it": (
        "bare",
        '{"tool_calls": [{"type": "function", "function": {"name": "multiply", "arguments": "{\\"a\\": 2}"}}]}',
        [call("multiply", a=2)],
    ),
    "JSON that is no call": ("bare", '{"answer": 42} is it', [TextPiece('{"answer": 42} is it')]),
    "an array that is no call": ("bare", "[1, 2]", [TextPiece("[1, 2]")]),
    "a fence of another language": ("bare", "```python\nprint()\n```", [TextPiece("```python\nprint()\n```")]),
    "plain text": ("bare", "Hello {you}", [TextPiece("Hello {you}")]),
    # DeepSeek-R1, Qwen3
    "thinking, then a call": (
        "thinking",
        "<think>\nHm, < think.\n</think>\n\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>',
        [ReasoningPiece("Hm, < think."), ROME],
    ),
    "no thinking before a call": (
        "thinking",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>',
        [ROME],
    ),
    "no thinking": ("thinking", "  <thin ice", [TextPiece("  <thin ice")]),
    "thinking that began in the prompt": (
        "begun",
        "Hm.\n</think>\n\nYes.\n",
        [ReasoningPiece("Hm."), TextPiece("Yes.\n")],
    ),
    "thinking without end": ("begun", "Hm.", [ReasoningPiece("Hm.")]),
}  # fmt: skip


MARKS = [
    "<tool_call>", "</tool_call>", "{", "}", '"', "\\", " ", "a", "[TOOL_CALLS]", "[", "]", "<think>", "</think>",
    "```json\n", ";", "<function=", "</function>", "\n",
]  # fmt: skip


def parsed(make: Make, pieces: list[str]) -> list[Piece]:
    parser, found = make(), list[Piece]()
    for piece in pieces:
        found += parser.push(piece)
    return list(joined([*found, *parser.flush()]))


def joined(pieces: list[Piece]) -> Iterator[Piece]:
    """Return the same parts with neighbouring texts joined."""
    for kind, group in groupby(pieces, type):
        if kind is ToolCall:
            yield from group
        else:
            yield kind("".join(piece.text for piece in group if not isinstance(piece, ToolCall)))


@pytest.mark.parametrize("case", CASES)
def test_a_published_format_cut_at_every_place(case: str) -> None:
    make, text, expected = CASES[case]
    assert parsed(MAKE[make], [text]) == expected
    assert parsed(MAKE[make], list(text)) == expected
    for cut in range(len(text) + 1):
        assert parsed(MAKE[make], [text[:cut], text[cut:]]) == expected


@given(st.sampled_from(list(CASES)), st.data())
def test_a_published_format_in_any_pieces(case: str, data: st.DataObject) -> None:
    make, text, expected = CASES[case]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    bounds = [0, *cuts, len(text)]
    assert parsed(MAKE[make], [text[a:b] for a, b in pairwise(bounds)]) == expected


@pytest.mark.parametrize("make", MAKE)
@given(st.lists(st.sampled_from(MARKS)))
def test_no_letter_is_lost_or_made_up(make: str, pieces: list[str]) -> None:
    """If nothing is a call, all but white space is in the text."""
    found = parsed(MAKE[make], pieces)
    said = "".join(piece.text for piece in found if not isinstance(piece, ToolCall))
    tags = ("<think>", "</think>") if make in ("thinking", "begun") else ()
    whole = "".join(pieces)
    for tag in tags:
        said, whole = said.replace(tag, ""), whole.replace(tag, "")
    assert not any(isinstance(piece, ToolCall) for piece in found)
    assert "".join(said.split()) == "".join(whole.split())


def test_families_by_what_their_templates_say() -> None:
    known = {
        "{% if tools %}<tools>{{ tools }}</tools> <tool_call>{% endif %}": HERMES,
        "{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]": MISTRAL,
        '{% if tools %}Environment: ipython {"name": name, "parameters": x}{% endif %}': LLAMA,
        "{% if tools %}<function=example>{% endif %}": FUNCTION,
        "{% if tools %}{{ tools }}{% endif %}": JSON,
    }
    for template, family in known.items():
        assert family_of(template) is family
    assert reasoning_tags("...<think>") == TAGS[0]
    assert reasoning_tags("plain") is None
    assert family_of(None) is JSON
