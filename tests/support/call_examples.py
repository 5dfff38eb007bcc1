"""The same two tool calls in each published format, written by hand from its description, without a template."""

from typing import Any

from tests.support.call_templates import wide

TOOLS: list[dict[str, Any]] = [
    {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
    {
        "name": "note",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}, "more": {"type": "object"}, "keep": {"type": "boolean"}},
        },
    },
]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": "Rome", "days": 5}),
    ("note", {"text": "7\n'two' \"é\"", "more": {"a": [1, "b"]}, "keep": True}),
]

_FIRST = '{"city": "Rome", "days": 5}'
_SECOND = r"""{"text": "7\n'two' \"é\"", "more": {"a": [1, "b"]}, "keep": true}"""
_OBJECTS = f'{{"name": "get_weather", "arguments": {_FIRST}}}', f'{{"name": "note", "arguments": {_SECOND}}}'
_PYTHON = (
    "get_weather(city='Rome', days=5)",
    r"""note(text="7\n'two' \"é\"", more={'a': [1, 'b']}, keep=True)""",
)


def _tagged(call: str, pair: str) -> list[str]:
    """Return the two calls. `call` has places for a name and its arguments, `pair` for a key and its value."""
    first = [("city", "Rome"), ("days", "5")]
    second = [("text", "7\n'two' \"é\""), ("more", '{"a": [1, "b"]}'), ("keep", "true")]
    return [
        call.replace("NAME", name).replace(
            "PAIRS", "".join(pair.replace("KEY", k).replace("VALUE", v) for k, v in given)
        )
        for name, given in (("get_weather", first), ("note", second))
    ]


_CODER = _tagged(
    "<tool_call>\n<function=NAME>\nPAIRS</function>\n</tool_call>", "<parameter=KEY>\nVALUE\n</parameter>\n"
)
_GLM = _tagged("<tool_call>NAME\nPAIRS</tool_call>", "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n")
_GLM_47 = _tagged("<tool_call>NAMEPAIRS</tool_call>", "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>")
_MINIMAX = _tagged('<invoke name="NAME">\nPAIRS</invoke>\n', '<parameter name="KEY">VALUE</parameter>\n')
_SEED = _tagged(
    "<seed:tool_call>\n<function=NAME>\nPAIRS</function>\n</seed:tool_call>", "<parameter=KEY>VALUE</parameter>\n"
)
_HUNYUAN = _tagged(
    "<tool_call:a>NAME<tool_sep:a>\nPAIRS</tool_call:a>\n",
    "<arg_key:a>KEY</arg_key:a>\n<arg_value:a>VALUE</arg_value:a>\n",
)
_DSML = _tagged(
    '<|DSML|invoke name="NAME">\nPAIRS</|DSML|invoke>\n',
    '<|DSML|parameter name="KEY" string="false">VALUE</|DSML|parameter>\n',
)
_STRINGS = ("city", "text")
for _key in _STRINGS:
    _DSML = [call.replace(f'"{_key}" string="false"', f'"{_key}" string="true"') for call in _DSML]

EXAMPLES: dict[str, str] = {
    "Hermes": "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in _OBJECTS),
    "Qwen3-Coder": "\n".join(_CODER),
    "GLM": "\n".join(_GLM),
    "GLM 4.7": "".join(_GLM_47),
    "MiniMax M2": f"<minimax:tool_call>\n{''.join(_MINIMAX)}</minimax:tool_call>",
    "Seed": "\n".join(_SEED),
    "DeepSeek V3.2": wide(f"<|DSML|function_calls>\n{''.join(_DSML)}</|DSML|function_calls>"),
    "DeepSeek V3.1": wide(
        f"<|tool▁calls▁begin|><|tool▁call▁begin|>get_weather<|tool▁sep|>{_FIRST}<|tool▁call▁end|>"
        f"<|tool▁call▁begin|>note<|tool▁sep|>{_SECOND}<|tool▁call▁end|><|tool▁calls▁end|>"
    ),
    "DeepSeek R1": wide(
        f"<|tool▁calls▁begin|><|tool▁call▁begin|>function<|tool▁sep|>get_weather\n```json\n{_FIRST}\n```"
        f"<|tool▁call▁end|>\n<|tool▁call▁begin|>function<|tool▁sep|>note\n```json\n{_SECOND}\n```<|tool▁call▁end|>"
        "<|tool▁calls▁end|>"
    ),
    "Kimi K2": (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{_FIRST}"
        f"<|tool_call_end|><|tool_call_begin|>functions.note:1<|tool_call_argument_begin|>{_SECOND}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    ),
    "Nemotron Nano 2": f"<TOOLCALL>[{', '.join(_OBJECTS)}]</TOOLCALL>",
    "Command": (
        f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {_FIRST}}},\n'
        f'    {{"tool_call_id": "1", "tool_name": "note", "parameters": {_SECOND}}}\n]<|END_ACTION|>'
    ),
    "Gemma 4": (
        '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:5}<tool_call|>'
        '<|tool_call>call:note{text:<|"|>7\n\'two\' "é"<|"|>,more:{a:[1,<|"|>b<|"|>]},keep:true}<tool_call|>'
    ),
    "LFM2": f"<|tool_call_start|>[{', '.join(_PYTHON)}]<|tool_call_end|>",
    "OLMo 3": "<function_calls>{}\n{}</function_calls>".format(*_PYTHON),
    "Mistral": f"[TOOL_CALLS][{', '.join(_OBJECTS)}]",
    "Mistral 2025": f"[TOOL_CALLS]get_weather[ARGS]{_FIRST}[TOOL_CALLS]note[ARGS]{_SECOND}",
    "Hunyuan A13B": f"<tool_calls>[{', '.join(_OBJECTS)}]</tool_calls>",
    "Hunyuan 3": f"<tool_calls:a>\n{''.join(_HUNYUAN)}</tool_calls:a>",
    "Apertus": f'<|tools_prefix|>[{{"get_weather": {_FIRST}}}, {{"note": {_SECOND}}}]<|tools_suffix|>',
}
"""Answers with both calls, by the names of `tests.support.call_templates.TEMPLATES`."""
