"""Families of chat templates: the way in which their models write tool calls."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from master.api.tools.bare import PYTHON_TAG, BareParser
from master.api.tools.learnt import LearntParser
from master.api.tools.marked import FUNCTION, HERMES, MarkedParser
from master.api.tools.mistral import MARKER, MistralParser
from master.api.tools.parser import ToolParser
from master.api.tools.reasoning import TAGS
from master.text.channels import SPELLED as HARMONY
from master.text.templates.calls import ANY, CallMarks

SPELLED = (MARKER, "[ARGS]", "[CALL_ID]", PYTHON_TAG, *HERMES, *(tag for pair in TAGS for tag in pair), *HARMONY)
"""Control tokens that parsers need to see as text."""


@dataclass(frozen=True)
class ToolFamily:
    """A syntax of tool calls, each between `opening` and `closing`. With `array`, all calls form one JSON array.

    `parser` creates a parser of calls to tools, each with a name and perhaps parameters. `marks` are set if the way was
    learnt from the chat template.
    """

    name: str
    parser: Callable[[Sequence[Mapping[str, Any]]], ToolParser]
    arguments: str = "arguments"  # the name of the arguments in a call's JSON
    opening: str = ""
    closing: str = ""
    array: bool = False
    marks: CallMarks | None = None

    @property
    def marker(self) -> str:
        """The text that begins each call and never occurs elsewhere; empty if calls are the whole answer."""
        if self.marks is not None:
            return (self.marks.section + self.marks.opening).strip().split(ANY)[0]
        return FUNCTION[0] if self.name == "function" else self.opening.rstrip()

    def beginnings(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the texts with which an answer of calls to these tools may begin."""
        spelled = tuple(f'{{"name": {json.dumps(name)}, "{self.arguments}": ' for name in names)
        return (self.marker,) if self.marker else spelled


_HERMES = ToolFamily(
    "hermes", lambda tools: MarkedParser(HERMES, _names(tools)), opening="<tool_call>\n", closing="\n</tool_call>"
)
_FUNCTION = ToolFamily("function", lambda tools: MarkedParser(FUNCTION, _names(tools)))
_LLAMA = ToolFamily("llama", lambda tools: BareParser(_names(tools)), arguments="parameters")
_MISTRAL = ToolFamily("mistral", lambda tools: MistralParser(_names(tools)), opening=MARKER, array=True)
_JSON = ToolFamily("json", lambda tools: BareParser(_names(tools)))


def _python(section: str, section_end: str, separator: str = ", ") -> CallMarks:
    """Return the marks of calls in Python's syntax."""
    return CallMarks(
        "values", section, name_end="(", key_end="=", string_end="=", between=", ", closing=")", separator=separator,
        section_end=section_end, quote="'",
    )  # fmt: skip


_UNSHOWN: Mapping[str, CallMarks] = {
    "<|tool_list_start|>": _python("<|tool_call_start|>[", "]<|tool_call_end|>"),  # LFM2
    "<function_calls>": _python("<function_calls>", "</function_calls>", "\n"),  # OLMo 3
    "func_name1(params_name1=": _python("[", "]"),  # Llama 3.2 and 4
    "<|tool_calls_section_begin|>": CallMarks(  # Kimi K2, whose template shows ids in place of names
        "json", "<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.",
        f":{ANY}<|tool_call_argument_begin|>", closing="<|tool_call_end|>", section_end="<|tool_calls_section_end|>",
    ),
}  # fmt: skip
"""Marks of calls by a text of the chat templates that do not show calls."""


def family_of(template: str | None, marks: CallMarks | None = None) -> ToolFamily:
    """Return the family of a template, found by the marks of its calls or the markers in it; the default is bare JSON.

    `marks`: what its renderings of calls tell.
    """
    template = template or ""
    if MARKER in template:
        return _MISTRAL
    if marks is None:
        marks = next((known for sign, known in _UNSHOWN.items() if sign in template), None)
    if marks is not None:
        return _learnt(marks)
    if HERMES[0] in template:
        return _HERMES
    if PYTHON_TAG in template or ("ipython" in template and "parameters" in template):
        return _LLAMA
    if FUNCTION[0] in template:
        return _FUNCTION
    return _JSON


def _learnt(marks: CallMarks) -> ToolFamily:
    """Return the family with these marks."""
    fields = (marks.name_key, marks.arguments_key)
    if marks.kind == "object" and (*fields, marks.beginnings, marks.array) == ("name", "arguments", HERMES[:1], False):
        return _HERMES
    if marks.kind == "json" and marks.beginnings == FUNCTION[:1]:
        return _FUNCTION
    return ToolFamily("learnt", lambda tools: LearntParser(marks, tools), marks=marks)


def _names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    return [tool["name"] for tool in tools]


def reasoning_tags(template: str | None) -> tuple[str, str] | None:
    """Return the tags around the reasoning of models with this template; None if it has none."""
    found = (pair for tag in (0, 1) for pair in TAGS if template and pair[tag] in template)
    return next(found, None)
