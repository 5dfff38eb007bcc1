"""The format of an answer (text, tool calls, a schema): one grammar, and its parser."""

import json
import re
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as FastTokenizer

from master.api.answers.collector import Collector
from master.api.answers.constraint import Grammars
from master.api.answers.events import Ended, Event, Piece, ReasoningPiece, TextPiece, ToolCall
from master.api.answers.formats import AnswerFormat, AnswerFormats
from master.api.answers.prepare import PreparedRequest
from master.api.openai.chat_form import ChatForm
from master.generation.answer import AnswerLimits
from master.generation.client import Client
from master.generation.request import DraftedTokens, Sampled
from master.text.channels import SPELLED, has_channels
from master.text.replay import Replay
from master.text.tokenizer import Message, Tokenizer
from tests.support import call_examples
from tests.support.call_examples import EXAMPLES
from tests.support.call_templates import CONTROLS, TEMPLATES, family, model_output
from tests.support.models import SPECIAL, VOCAB, write_tokenizer

SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False,
}  # fmt: skip
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "look", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "any", "parameters": SCHEMA}},
]
WIDTH = VOCAB + len(SPELLED) + len(CONTROLS)
MESSAGES: Any = [{"role": "user", "content": "Go"}]
LOOK, ANY = ToolCall("look", '{"x": 5}'), ToolCall("any", '{"q": 1}')


def hermes(call: ToolCall) -> str:
    return f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>'


def mistral(call: ToolCall) -> str:
    return f'[TOOL_CALLS][{{"name": "{call.name}", "arguments": {call.arguments}}}]'


def function(call: ToolCall) -> str:
    return f"<function={call.name}>{call.arguments}</function>"


def llama(call: ToolCall) -> str:
    return f'{{"name": "{call.name}", "parameters": {call.arguments}}}'


def generic(call: ToolCall) -> str:
    return f'{{"name": "{call.name}", "arguments": {call.arguments}}}'


def harmony(call: ToolCall) -> str:
    return f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>{call.arguments}"


def learnt(name: str) -> tuple[str, Callable[[ToolCall], str]]:
    """Return a template whose call format is learnt, and how its model writes a call, with the grammar's spaces."""
    template = TEMPLATES[name]
    traits = family(template)[1]

    def write(call: ToolCall) -> str:
        said = model_output(traits, [(call.name, dict(json.loads(call.arguments)))], "").strip()
        return re.sub(r', "id": "\w+"|(?<=\[)\s+(?={)|(?<=})\s+(?=\])', "", said)

    return template + "{{ tools }}", write


UNSHOWN: dict[str, tuple[str, Callable[[ToolCall], str]]] = {  # templates that do not show calls
    "hermes": ("{{ messages }}{{ tools }} <tool_call>", hermes),
    "mistral": ("{{ messages }}{{ tools }} [TOOL_CALLS]", mistral),
    "function": ("{{ messages }}{{ tools }} <function=", function),
    "llama": ("{{ messages }}{{ tools }} <|python_tag|>", llama),
    "generic": ("", generic),
}
FAMILIES = UNSHOWN | {name: learnt(name) for name in TEMPLATES}
HARMONY = "{{ messages }}{{ tools }} <|channel|><|message|>"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tokenizer]:
    """Return the tiny tokenizer with a chat template, and the control tokens that the template needs."""

    @cache
    def make(template: str) -> Tokenizer:
        directory = tmp_path_factory.mktemp("tokenizer")
        write_tokenizer(directory)
        fast = FastTokenizer.from_file(str(directory / "tokenizer.json"))
        if has_channels(template):
            fast.add_special_tokens(list(SPELLED))
        fast.add_special_tokens([mark for mark in CONTROLS if mark in template])
        end = fast.token_to_id(SPECIAL[-1])
        return Tokenizer(fast, {"chat_template": template, "eos_ids": [end]})

    return make


def shape_of(tokenizer: Tokenizer, **more: Any) -> AnswerFormat:
    form = ChatForm.model_validate({"messages": MESSAGES, "tools": TOOLS, **more})
    return AnswerFormats(tokenizer).for_chat(form.ask(Client()), begun=False)


@cache
def grammars_of(tokenizer: Tokenizer) -> Grammars:
    """Return grammars that are compiled once, as in a server."""
    return Grammars(tokenizer, WIDTH)


def allowed(tokenizer: Tokenizer, shape: AnswerFormat, text: str) -> bool:
    """Return True if the grammar allows the answer `text`, and its end there."""
    assert shape.grammar
    constraint = grammars_of(tokenizer).compiled(shape.grammar, shape.field).copy()
    logits = np.zeros(WIDTH, np.float32)
    for token in [*tokenizer.encode(text, special=False), *tokenizer.eos_ids]:
        if not np.isfinite(constraint.allow(logits)[token]):
            return False
        constraint.accept(token)
    return True


def read(shape: AnswerFormat, text: str, size: int) -> list[Piece]:
    parser = shape.parser()
    pieces = [piece for at in range(0, len(text), size) for piece in parser.push(text[at : at + size])]
    return joined([*pieces, *parser.flush()])


def joined(pieces: list[Piece]) -> list[Piece]:
    """Return the same parts with neighbouring texts joined."""
    found: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, TextPiece) and found and isinstance(found[-1], TextPiece):
            found[-1] = TextPiece(found[-1].text + piece.text)
        else:
            found.append(piece)
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_strict_arguments_are_held_to_their_schema_beside_text(name: str, model: Callable[[str], Tokenizer]) -> None:
    template, write = FAMILIES[name]
    tokenizer = model(template)
    shape = shape_of(tokenizer)
    assert shape.field == "tools"
    for call in (LOOK, ANY):  # the other tool's arguments are any object
        assert allowed(tokenizer, shape, write(call))
        assert read(shape, write(call), 3) == [call]
    for text in ("", "Hello you. { [ <b>", "```python\n1\n```"):
        assert allowed(tokenizer, shape, text)
    for arguments in ('{"x": "a"}', "{}", '{"x": 5, "y": 1}', "[]"):
        assert not allowed(tokenizer, shape, write(ToolCall("look", arguments)))
    assert not allowed(tokenizer, shape, write(ToolCall("other", "{}")))
    if AnswerFormats(tokenizer).family.marker:
        assert allowed(tokenizer, shape, f"Hello {write(LOOK)}")
        assert not allowed(tokenizer, shape, f"Hello {write(ToolCall('look', '{}'))}")
    else:
        assert not allowed(tokenizer, shape, '```json\n{"name": "look"}\n```')


def test_strict_tools_of_a_model_that_writes_in_channels(model: Callable[[str], Tokenizer]) -> None:
    tokenizer = model(HARMONY)
    shape, thought = shape_of(tokenizer), "<|channel|>analysis<|message|>Well.<|end|><|start|>assistant"
    assert allowed(tokenizer, shape, f"{thought}<|channel|>final<|message|>It is {{}}.")
    assert allowed(tokenizer, shape, harmony(LOOK))
    assert allowed(tokenizer, shape, thought + harmony(ANY))
    assert allowed(tokenizer, shape, f'{thought} to=functions.look<|channel|>commentary json<|message|>{{"x": 5}}')
    assert not allowed(tokenizer, shape, thought + harmony(ToolCall("look", "{}")))
    assert not allowed(tokenizer, shape, thought + harmony(ToolCall("other", "{}")))
    assert read(shape, f"{thought}{harmony(LOOK)}<|call|>", 1000) == [ReasoningPiece("Well."), LOOK]


def test_tools_without_strict_need_no_grammar(model: Callable[[str], Tokenizer]) -> None:
    lax = [{**tool, "function": {**tool["function"], "strict": False}} for tool in TOOLS]
    assert shape_of(model("{{ messages }}{{ tools }} <tool_call>"), tools=lax).grammar is None
    assert shape_of(model("{{ messages }}{{ tools }} <tool_call>"), tool_choice="none").grammar is None


def test_what_a_model_is_told_of_a_tool_does_not_say_strict() -> None:
    ask = ChatForm.model_validate({"messages": MESSAGES, "tools": TOOLS}).ask(Client())
    assert ask.use.strict == {"look"}
    assert not any("strict" in tool for tool in ask.use.tools)


ANSWERS: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "json_object"}, '{"name": "look", "age": 3, "b": "<tool_call>"}', "[1]"),
    ({"type": "json_schema", "json_schema": {"schema": SCHEMA}}, '{"x": 7}', '{"y": 7}'),
    ({"type": "regex", "pattern": "<tool_call>[a-c]{3}"}, "<tool_call>abc", "abc"),
    ({"type": "regex", "pattern": '"\\d{2}"/'}, '"12"/', "12/"),
]


@pytest.mark.parametrize("name", [*UNSHOWN, "Qwen3-Coder", "Gemma 4", "Command", "made up"])
@pytest.mark.parametrize(("form", "good", "bad"), ANSWERS)
def test_a_form_beside_tools_allows_the_form_or_a_call(
    name: str, form: dict[str, Any], good: str, bad: str, model: Callable[[str], Tokenizer]
) -> None:
    """An answer in the format is text, whatever it contains; a call is a call."""
    template, write = FAMILIES[name]
    tokenizer = model(template)
    shape = shape_of(tokenizer, response_format=form)
    assert shape.field.startswith("response_format")
    assert allowed(tokenizer, shape, good)
    assert allowed(tokenizer, shape, write(LOOK))
    assert not allowed(tokenizer, shape, bad)
    assert not allowed(tokenizer, shape, "Hello")
    for size in (1, 7, 1000):
        assert read(shape, write(LOOK), size) == [LOOK]
        assert read(shape, good, size) == [TextPiece(good)]


def test_what_is_cut_off_before_it_is_known_is_text(model: Callable[[str], Tokenizer]) -> None:
    shape = shape_of(model("{{ messages }}{{ tools }} <tool_call>"), response_format={"type": "json_object"})
    assert read(shape, "<tool_", 1) == [TextPiece("<tool_")]


class Heard:
    """An answer whose tokens arrive one by one, as from the engine's thread."""

    def __init__(self, tokenizer: Tokenizer, shape: AnswerFormat) -> None:
        self.events: list[Event] = []
        self.replay = Replay()
        meter: Any = SimpleNamespace(first_token=lambda s: None, next_token=lambda s: None, over=lambda *a: None)
        prepared = PreparedRequest([1], 500, shape, AnswerFormats(tokenizer).spelled(with_tools=True), True)
        deliver: Any = self.events.extend
        self._collector = Collector(tokenizer, prepared, AnswerLimits(500), self.replay, meter, deliver)
        asked: Any = SimpleNamespace(client=Client())
        self._collector.ticket = SimpleNamespace(
            at=0.0, first_admitted=0.0, cached=0, asked=asked, drafts=DraftedTokens()
        )  # type: ignore[assignment]

    def run(self, tokens: list[int]) -> int:
        """Return the number of tokens taken before the answer ended."""
        taken = 0
        for token in tokens:
            taken += 1
            if not self._collector.token(Sampled(None, token, 0.0)):  # type: ignore[arg-type]
                break
        self._collector.ended(None)
        return taken

    @property
    def calls(self) -> list[ToolCall]:
        return [event for event in self.events if isinstance(event, ToolCall)]


def test_an_answer_of_one_call_at_most_is_over_with_it(model: Callable[[str], Tokenizer]) -> None:
    tokenizer = model("{{ messages }}{{ tools }} <tool_call>")
    lax = [{**tool, "function": {"name": tool["function"]["name"]}} for tool in TOOLS]
    first = tokenizer.encode(f"I look. {hermes(LOOK)}", special=False)
    both = [*first, *tokenizer.encode(f"\n{hermes(ANY)}", special=False), *tokenizer.eos_ids]
    one = Heard(tokenizer, shape_of(tokenizer, tools=lax, parallel_tool_calls=False))
    assert one.run(both) == len(first)
    assert [call.name for call in one.calls] == ["look"]
    assert isinstance(one.events[-1], Ended)
    assert one.events[-1].reason == "tool_calls"
    sent_back: Message = {"role": "assistant", "content": "I look.", "tool_calls": [{"id": one.calls[0].id}]}
    assert one.replay.find([sent_back]) == {0: tuple(first)}
    several = Heard(tokenizer, shape_of(tokenizer, tools=lax))
    assert several.run(both) == len(both)
    assert [call.name for call in several.calls] == ["look", "any"]


def test_the_first_of_calls_at_once_is_taken_without_replay(
    model: Callable[[str], Tokenizer],
) -> None:
    tokenizer = model("{{ messages }}{{ tools }} [TOOL_CALLS]")
    array = f"[TOOL_CALLS][{generic(LOOK)}, {generic(ANY)}]"
    lax = [{**tool, "function": {"name": tool["function"]["name"]}} for tool in TOOLS]
    one = Heard(tokenizer, shape_of(tokenizer, tools=lax, parallel_tool_calls=False))
    one.run([*tokenizer.encode(array, special=False), *tokenizer.eos_ids])
    assert [call.name for call in one.calls] == ["look"]
    sent_back: Message = {"role": "assistant", "content": "", "tool_calls": [{"id": one.calls[0].id}]}
    assert one.replay.find([sent_back]) == {}


AS_JSON = {  # grammars spell objects and words as JSON
    "'Rome'": '"Rome"', "{'a': [1, 'b']}": '{"a": [1, "b"]}', "True": "true",
    '{a:[1,<|"|>b<|"|>]}': '{"a": [1, "b"]}', "[\n    {": "[{", "},\n    {": "}, {", "}\n]": "}]",
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_several_published_calls_are_allowed_where_a_call_is_required(
    name: str, model: Callable[[str], Tokenizer]
) -> None:
    tokenizer = model(TEMPLATES[name] + "{{ tools }}")
    tools = [{"type": "function", "function": tool} for tool in call_examples.TOOLS]
    text = EXAMPLES[name]
    for own, spelled in AS_JSON.items():
        text = text.replace(own, spelled)
    several = shape_of(tokenizer, tools=tools, tool_choice="required")
    single = shape_of(tokenizer, tools=tools, tool_choice="required", parallel_tool_calls=False)
    assert allowed(tokenizer, several, text)
    assert not allowed(tokenizer, single, text)
    assert not allowed(tokenizer, several, f"I look.{text}")
    assert not allowed(tokenizer, several, text.replace("get_weather", "get_time"))
