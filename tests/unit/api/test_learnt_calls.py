"""Formats of calls are learnt from templates that write the marks of published ones, and of one that is made up."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from master.api.answers.events import Piece, ReasoningPiece, TextPiece, ToolCall
from master.api.tools.families import ToolFamily, family_of, reasoning_tags
from master.api.tools.parser import NoTools
from master.api.tools.reasoning import ReasoningParser
from master.api.tools.typed import typed
from master.text.templates.renderer import open_work
from master.text.templates.traits import Traits
from tpi.errors import ModelError

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

TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}CALLS<|end|>{% endfor %}"
EACH = "{% for c in m.tool_calls %}CALL{% endfor %}"
RAW = "{{ v if v is string else v | tojson }}"
NAME, ARGUMENTS, INDEX = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}", "{{ loop.index0 }}"
OPEN, CLOSE = "{{ '{' }}", "{{ '}' }}"


def turns(calls: str) -> str:
    return TURNS.replace("CALLS", "{% if m.tool_calls %}" + calls + "{% endif %}")


def each(call: str, before: str = "", after: str = "", between: str = "") -> str:
    loop = EACH.replace("CALL", call + ("{% if not loop.last %}" + between + "{% endif %}" if between else ""))
    return turns(before + loop + after)


def pairs(pair: str, between: str = "") -> str:
    middle = "{% if not loop.last %}" + between + "{% endif %}" if between else ""
    return "{% for k, v in c.function.arguments | items %}" + pair.replace("VALUE", RAW) + middle + "{% endfor %}"


GEMMA = (  # its quotes around strings, and keys without any
    "{% macro w(v) %}{% if v is string %}<|\"|>{{ v }}<|\"|>{% elif v is mapping %}{{ '{' }}{% for k, x in v | items %}"
    "{{ k }}:{{ w(x) }}{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}{% elif v is iterable %}[{% for x in v %}"
    "{{ w(x) }}{% if not loop.last %},{% endif %}{% endfor %}]{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
)
PYTHON = "{{ k }}={{ v if v is boolean or v is number else v | tojson if v is not string else w(v) }}"
PYTHON_STRING = "{% macro w(v) %}'{{ v | replace('\n', '\\\\n') }}'{% endmacro %}"
TEMPLATES = {
    "Qwen3-Coder": each(
        f"\n<tool_call>\n<function={NAME}>\n"
        + pairs("<parameter={{ k }}>\nVALUE\n</parameter>\n")
        + "</function>\n</tool_call>"
    ),
    "GLM": each(
        f"\n<tool_call>{NAME}\n"
        + pairs("<arg_key>{{ k }}</arg_key>\n<arg_value>VALUE</arg_value>\n")
        + "</tool_call>"
    ),
    "GLM 4.7": each(
        f"<tool_call>{NAME}" + pairs("<arg_key>{{ k }}</arg_key><arg_value>VALUE</arg_value>") + "</tool_call>"
    ),
    "MiniMax M2": each(
        f'<invoke name="{NAME}">\n' + pairs('<parameter name="{{ k }}">VALUE</parameter>\n') + "</invoke>\n",
        "\n<minimax:tool_call>\n",
        "</minimax:tool_call>",
    ),
    "DeepSeek V3.2": each(
        f'<|DSML|invoke name="{NAME}">\n'
        + pairs('<|DSML|parameter name="{{ k }}" string="{{ (v is string) | lower }}">VALUE</|DSML|parameter>\n')
        + "</|DSML|invoke>\n",
        "\n\n<|DSML|function_calls>\n",
        "</|DSML|function_calls>",
    ),
    "Seed": each(
        f"\n<seed:tool_call>\n<function={NAME}>\n"
        + pairs("<parameter={{ k }}>VALUE</parameter>\n")
        + "</function>\n</seed:tool_call>"
    ),
    "DeepSeek V3.1": each(
        f"<|tool_call_begin|>{NAME}<|tool_sep|>{ARGUMENTS}<|tool_call_end|>",
        "<|tool_calls_begin|>", "<|tool_calls_end|>",
    ),
    "DeepSeek R1": each(
        f"<|call_begin|>function<|tool_sep|>{NAME}\n```json\n{ARGUMENTS}\n```<|call_end|>",
        "<|calls_begin|>", "<|calls_end|>", "\n",
    ),
    "Kimi K2": each(
        f"<|tool_call_begin|>functions.{NAME}:{INDEX}<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>",
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
    ),
    "Solar": each(
        f"<|call:begin|>{{{{ c.id }}}}<|call:name|>{NAME}<|call:args|>{ARGUMENTS}<|call:end|>", "<|tool_calls|>"
    ),
    "Nemotron Nano 2": each(
        f'{OPEN}"name": "{NAME}", "arguments": {ARGUMENTS}{CLOSE}',
        "\n<TOOLCALL>[", "]</TOOLCALL>", ", ",
    ),
    "Command": each(
        f'{OPEN}"tool_call_id": "{INDEX}", "tool_name": "{NAME}", "parameters": {ARGUMENTS}{CLOSE}',
        "<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>", ",\n    ",
    ),
    "Gemma 4": GEMMA + each(
        f"<|tool_call>call:{NAME}{{{{ '{{' }}}}{pairs('{{ k }}:{{ w(v) }}', ',')}{{{{ '}}' }}}}<tool_call|>"
    ),
    "LFM2": PYTHON_STRING + each(f"{NAME}({pairs(PYTHON, ', ')})", "<|tool_call_start|>[", "]<|tool_call_end|>", ", "),
    "OLMo 3": PYTHON_STRING + each(f"{NAME}({pairs(PYTHON, ', ')})", "<function_calls>", "</function_calls>", "\n"),
    "made up": each(f"((CALL {NAME} :: {pairs('~~{{ k }}~>VALUE<~~')} ENDCALL))"),
}  # fmt: skip


def family(template: str) -> tuple[ToolFamily, Traits]:
    work = open_work({"source": template, "special": {"bos_token": "<s>", "eos_token": "</s>"}})

    def render(messages: Sequence[Mapping[str, Any]], names: Mapping[str, Any]) -> str:
        try:
            asked = {"messages": list(messages), "names": dict(names), "answers": [], "first_answer": 0xF0000}
            return str(work(asked)["text"])
        except Exception as error:
            raise ModelError(str(error)) from error

    traits = Traits(render)
    return family_of(template, traits.call_marks), traits


def spoken(traits: Traits, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """What a model would write: a text and these calls."""
    made = [
        {"id": f"a1b2c3d4{place}", "type": "function", "function": {"name": name, "arguments": given}}
        for place, (name, given) in enumerate(calls)
    ]
    turn = {"role": "assistant", "content": "I look.", "tool_calls": made}
    return traits._tried([{"role": "user", "content": "?"}, turn]).split("<|assistant|>")[1].split("<|end|>")[0]


def parsed(family: ToolFamily, pieces: Sequence[str]) -> tuple[list[tuple[str, Any]], str]:
    parser = family.parser(TOOLS)
    found: list[Piece] = [one for piece in pieces for one in parser.push(piece)]
    found += parser.flush()
    calls = [(one.name, json.loads(one.arguments)) for one in found if isinstance(one, ToolCall)]
    return calls, "".join(one.text for one in found if isinstance(one, TextPiece))


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_are_read_as_the_template_writes_them(name: str) -> None:
    learnt, traits = family(TEMPLATES[name])
    assert learnt.marks
    text = spoken(traits, CALLS)
    expected = (CALLS, "I look.")
    assert parsed(learnt, [text]) == expected
    assert parsed(learnt, list(text)) == expected
    for cut in range(len(text) + 1):
        assert parsed(learnt, [text[:cut], text[cut:]]) == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_cut_off_calls_and_unknown_tools_are_text(name: str) -> None:
    learnt, traits = family(TEMPLATES[name])
    text = spoken(traits, [("other_tool", {"city": "Rome"})])
    for pieces in ([text], list(text)):
        calls, said = parsed(learnt, pieces)
        assert calls == []
        assert "".join(said.split()) == "".join(text.split())
    whole = spoken(traits, CALLS[:1])
    calls, said = parsed(learnt, list(whole[: whole.index("Rome") + 4]))
    assert calls == []
    assert said == whole[: whole.index("Rome") + 4]


def test_calls_without_the_first_tag_are_read() -> None:
    """Qwen3-Coder often leaves it out."""
    learnt, _ = family(TEMPLATES["Qwen3-Coder"])
    text = "<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
    for pieces in ([text], list(text)):
        assert parsed(learnt, pieces) == ([("get_weather", {"city": "Rome"})], "")


def test_a_value_may_contain_its_own_end() -> None:
    learnt, traits = family(TEMPLATES["Qwen3-Coder"])
    given = {"city": "a\n</parameter>\nb"}
    assert parsed(learnt, list(spoken(traits, [("get_weather", given)])))[0] == [("get_weather", given)]


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
