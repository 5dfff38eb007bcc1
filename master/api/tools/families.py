"""Families of chat templates: the way in which their models write tool calls."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from master.api.tools.bare import PYTHON_TAG, BareParser
from master.api.tools.marked import FUNCTION, HERMES, MarkedParser
from master.api.tools.mistral import MARKER, MistralParser
from master.api.tools.parser import ToolParser
from master.api.tools.reasoning import TAGS
from master.text.channels import SPELLED as HARMONY

SPELLED = (MARKER, "[ARGS]", "[CALL_ID]", PYTHON_TAG, *HERMES, *(tag for pair in TAGS for tag in pair), *HARMONY)
"""Control tokens that parsers need to see as text."""


@dataclass(frozen=True)
class ToolFamily:
    """A syntax of tool calls, each between `opening` and `closing`. With `array`, all calls form one JSON array."""

    name: str
    parser: Callable[[Sequence[str]], ToolParser]
    arguments: str = "arguments"  # the name of the arguments in a call's JSON
    opening: str = ""
    closing: str = ""
    array: bool = False

    @property
    def marker(self) -> str:
        """The text that begins each call and never occurs elsewhere; empty if calls are the whole answer."""
        return FUNCTION[0] if self.name == "function" else self.opening.rstrip()

    def beginnings(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the texts with which an answer of calls to these tools may begin."""
        spelled = tuple(f'{{"name": {json.dumps(name)}, "{self.arguments}": ' for name in names)
        return (self.marker,) if self.marker else spelled


_HERMES = ToolFamily(
    "hermes", lambda names: MarkedParser(HERMES, names), opening="<tool_call>\n", closing="\n</tool_call>"
)
_FUNCTION = ToolFamily("function", lambda names: MarkedParser(FUNCTION, names))
_LLAMA = ToolFamily("llama", BareParser, arguments="parameters")
_MISTRAL = ToolFamily("mistral", MistralParser, opening=MARKER, array=True)
_JSON = ToolFamily("json", BareParser)


def family_of(template: str | None) -> ToolFamily:
    """Return the family of a template, found by the markers in it; the default is bare JSON."""
    template = template or ""
    if HERMES[0] in template:
        return _HERMES
    if MARKER in template:
        return _MISTRAL
    if PYTHON_TAG in template or ("ipython" in template and "parameters" in template):
        return _LLAMA
    if FUNCTION[0] in template:
        return _FUNCTION
    return _JSON


def reasoning_tags(template: str | None) -> tuple[str, str] | None:
    """Return the tags around the reasoning of models with this template; None if it has none."""
    return next((pair for pair in TAGS if template and pair[0] in template), None)
