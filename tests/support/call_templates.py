"""Chat templates that write tool calls with the marks of published formats, and with invented marks."""

from collections.abc import Mapping, Sequence
from typing import Any

from master.api.tools.families import ToolFamily, family_of
from master.text.templates.renderer import open_work
from master.text.templates.traits import Traits
from tpi.errors import ModelError

TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}CALLS<|end|>{% endfor %}"
EACH = "{% for c in m.tool_calls %}CALL{% endfor %}"
RAW = "{{ v if v is string else v | tojson }}"
NAME, ARGUMENTS, INDEX = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}", "{{ loop.index0 }}"
OPEN, CLOSE = "{{ '{' }}", "{{ '}' }}"


def turns(calls: str) -> str:
    calls = calls.replace("\n", "{{ '\n' }}")  # the renderer drops line ends after blocks
    return TURNS.replace("CALLS", "{% if m.tool_calls %}" + calls + "{% endif %}")


def each(call: str, before: str = "", after: str = "", between: str = "") -> str:
    loop = EACH.replace("CALL", call + ("{% if not loop.last %}" + between + "{% endif %}" if between else ""))
    return turns(before + loop + after)


def wide(text: str) -> str:
    """Return `text` with the wide bars of DeepSeek's marks."""
    for mark in ("<|", "</|", "|>", "DSML|"):
        text = text.replace(mark, mark.replace("|", "\uff5c"))
    return text


def deepseek(*parts: str) -> str:
    return each(*map(wide, parts))


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
    "DeepSeek V3.2": deepseek(
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
    "DeepSeek V3.1": deepseek(
        f"<|tool▁call▁begin|>{NAME}<|tool▁sep|>{ARGUMENTS}<|tool▁call▁end|>",
        "<|tool▁calls▁begin|>", "<|tool▁calls▁end|>",
    ),
    "DeepSeek R1": deepseek(
        f"<|tool▁call▁begin|>function<|tool▁sep|>{NAME}\n```json\n{ARGUMENTS}\n```<|tool▁call▁end|>",
        "<|tool▁calls▁begin|>", "<|tool▁calls▁end|>", "\n",
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
    "Hermes": each(f'\n<tool_call>\n{OPEN}"name": "{NAME}", "arguments": {ARGUMENTS}{CLOSE}\n</tool_call>'),
    "Mistral": each(
        f'{OPEN}"name": "{NAME}", "arguments": {ARGUMENTS}, "id": "{{{{ c.id }}}}"{CLOSE}', "[TOOL_CALLS][", "]", ", "
    ),
    "Mistral 2025": each(f"[TOOL_CALLS]{NAME}[ARGS]{ARGUMENTS}"),
    "Hunyuan A13B": each(
        f'{OPEN}"name": "{NAME}", "arguments": {ARGUMENTS}{CLOSE}', "<tool_calls>[", "]</tool_calls>", ", "
    ),
    "Hunyuan 3": each(
        f"<tool_call:a>{NAME}<tool_sep:a>\n"
        + pairs("<arg_key:a>{{ k }}</arg_key:a>\n<arg_value:a>VALUE</arg_value:a>\n")
        + "</tool_call:a>\n",
        "<tool_calls:a>\n", "</tool_calls:a>",
    ),
    "Apertus": each(
        f'{OPEN}"{NAME}": {ARGUMENTS}{CLOSE}', "<|tools_prefix|>[", "]<|tools_suffix|>", ", "
    ),
    "made up": each(f"((CALL {NAME} :: {pairs('~~{{ k }}~>VALUE<~~')} ENDCALL))"),
}  # fmt: skip


_MARKS = """<|tool_call> <tool_call|> <|"|> <|tool_call_start|> <|tool_call_end|> <|tool_calls_section_begin|>
<|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> <|START_ACTION|> <|END_ACTION|>
[TOOL_CALLS] [ARGS] <|tools_prefix|> <|tools_suffix|> <|call:begin|> <|call:end|>"""
_DEEPSEEK = "<|tool▁calls▁begin|> <|tool▁calls▁end|> <|tool▁call▁begin|> <|tool▁call▁end|> <|tool▁sep|>"
CONTROLS = (*_MARKS.split(), *wide(_DEEPSEEK).split())
"""Marks that are control tokens of the published models."""


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


def model_output(traits: Traits, calls: Sequence[tuple[str, Mapping[str, Any]]], said: str = "I look.") -> str:
    """Return a model's output: the text `said` and the calls `calls`, in the format of `traits`."""
    made = [
        {"id": f"a1b2c3d4{place}", "type": "function", "function": {"name": name, "arguments": given}}
        for place, (name, given) in enumerate(calls)
    ]
    turn = {"role": "assistant", "content": said, "tool_calls": made}
    return traits._tried([{"role": "user", "content": "?"}, turn]).split("<|assistant|>")[1].split("<|end|>")[0]
