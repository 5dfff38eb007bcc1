"""Families of chat templates: the way in which their models write tool calls."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from master.api.tools.bare import PYTHON_TAG, BareParser
from master.api.tools.learnt import LearntParser
from master.api.tools.parser import ToolParser
from master.api.tools.reasoning import TAGS
from master.text.channels import SPELLED as HARMONY
from master.text.templates.calls import ANY, CallMarks

SPELLED = (PYTHON_TAG, *(tag for pair in TAGS for tag in pair), *HARMONY)
"""Control tokens that parsers need to see as text, in addition to those in the marks of calls."""


@dataclass(frozen=True)
class ToolFamily:
    """A syntax of tool calls: its marks, from which grammars are built, and a function that returns a parser for tools.

    Each tool has a name and perhaps parameters.
    """

    marks: CallMarks
    parser: Callable[[Sequence[Mapping[str, Any]]], ToolParser]

    @property
    def marker(self) -> str:
        """The text before each call, which occurs nowhere else; empty if calls are the whole answer."""
        return (self.marks.section + self.marks.opening).strip().split(ANY)[0]

    def beginnings(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the texts with which an answer may begin if it calls tools named `names`."""
        fields = self.marks.name_key, self.marks.arguments_key
        spelled = tuple(f'{{"{fields[0]}": {json.dumps(name)}, "{fields[1]}": ' for name in names)
        return (self.marker,) if self.marker else spelled


def _learnt(marks: CallMarks) -> ToolFamily:
    return ToolFamily(marks, lambda tools: LearntParser(marks, tools))


def _bare(arguments: str) -> ToolFamily:
    marks = CallMarks("object", arguments_key=arguments)
    return ToolFamily(marks, lambda tools: BareParser([tool["name"] for tool in tools]))


def _python(section: str, section_end: str, separator: str = ", ") -> CallMarks:
    return CallMarks(
        "values", section, name_end="(", key_end="=", string_end="=", between=", ", closing=")", separator=separator,
        section_end=section_end, quote="'",
    )  # fmt: skip


HERMES = _learnt(CallMarks("object", opening="<tool_call>\n", closing="\n</tool_call>", separator="\n"))
FUNCTION = _learnt(CallMarks("json", opening="<function=", name_end=">", closing="</function>"))
MISTRAL = _learnt(CallMarks("object", opening="[TOOL_CALLS]", array=True))
LLAMA = _bare("parameters")
JSON = _bare("arguments")
_LFM2 = _learnt(_python("<|tool_call_start|>[", "]<|tool_call_end|>"))

_UNSHOWN: Mapping[str, ToolFamily] = {
    "<|tool_list_start|>": _LFM2,
    "List of tools: [": _LFM2,
    "<function_calls>": _learnt(_python("<function_calls>", "</function_calls>", "\n")),  # OLMo 3
    "func_name1(params_name1=": _learnt(_python("[", "]")),  # Llama 3.2 and 4
    "<atem:function_calls>": _learnt(CallMarks(  # Muse Glimmer, whose template also names the tool as the recipient
        "tags", "<atem:function_calls>\n", '<atem:invoke name="', '">\n', '<atem:parameter name="', '">', '">',
        "</atem:parameter>\n", closing="</atem:invoke>\n", section_end="</atem:function_calls>",
    )),
    "<|tool_calls_section_begin|>": _learnt(CallMarks(  # Kimi K2, whose template shows ids in place of names
        "json", "<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.",
        f":{ANY}<|tool_call_argument_begin|>", closing="<|tool_call_end|>", section_end="<|tool_calls_section_end|>",
    )),
    "[TOOL_CALLS]": MISTRAL,
    "<tool_call>": HERMES,
    "<function=": FUNCTION,
    PYTHON_TAG: LLAMA,
    "ipython": LLAMA,
}  # fmt: skip
"""Families of chat templates that do not show calls, by a text in the template. The first text that occurs decides."""


def family_of(template: str | None, marks: CallMarks | None = None) -> ToolFamily:
    """Return the family of a template, found by the marks of its calls or the markers in it; the default is bare JSON.

    `marks`: the marks of calls that the template wrote in a trial, if any.
    """
    if marks is not None:
        return _learnt(marks)
    return next((family for sign, family in _UNSHOWN.items() if sign in (template or "")), JSON)


def reasoning_tags(template: str | None) -> tuple[str, str] | None:
    """Return the tags around the reasoning of models with this template; None if it has none."""
    found = (pair for tag in (0, 1) for pair in TAGS if template and pair[tag] in template)
    return next(found, None)
