"""Which family a chat template belongs to: how its models write tool calls, and how the grammar of a call begins."""

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
"""Control tokens that parsers have to see."""


@dataclass(frozen=True)
class ToolFamily:
    """How calls are written. `opening` and `closing` stand around each, `array` if all are one JSON array."""

    name: str
    parser: Callable[[Sequence[str]], ToolParser]
    arguments: str = "arguments"  # what the object calls them
    opening: str = ""
    closing: str = ""
    array: bool = False

    @property
    def marker(self) -> str:
        """What no text has but calls begin with; empty where calls are the whole answer."""
        return FUNCTION[0] if self.name == "function" else self.opening.rstrip()

    def beginnings(self, names: Sequence[str]) -> tuple[str, ...]:
        """How an answer of calls of tools of these names begins, as grammars write it."""
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
    """The family of a template that mentions its markers; bare JSON for all others."""
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
    """The tags between which models of this template think, if they do."""
    return next((pair for pair in TAGS if template and pair[0] in template), None)
