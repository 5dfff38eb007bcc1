"""Tools of other kinds than functions: they are left out of what the model is offered, and the client is told so.

A client offers what its usual server has: a search on the web, a shell, a patch in a grammar of its own. Refusing the
whole request for one of them would keep such clients out, and no model here was trained to use them.
"""

import logging
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from master.api.answers.ask import ToolUse
from master.api.failures import RequestError
from master.api.forms import FormPart

HEADER = "X-TPI-Left-Out-Tools"
FIELDS_HEADER = "X-TPI-Left-Out-Fields"
FUNCTION, OTHER = "function-tool", "other-tool"  # tags of the two branches of a tool
_MOST_LOGGED = 64  # types: a client makes them up

log = logging.getLogger("tpi.serve")


class Named(FormPart):
    """The name in a tool of OpenAI's chat completions."""

    model_config = ConfigDict(extra="ignore")

    name: str | None = Field(None, max_length=128)


class OtherTool(FormPart):
    """A tool, or the choice of one, that is not a function. Its other fields are not read."""

    model_config = ConfigDict(extra="ignore")

    type: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:/-]{1,64}$")]
    name: str | None = Field(None, max_length=128)
    custom: Named | None = None

    @property
    def called(self) -> str:
        """Its name, which is its type where it has none."""
        return self.name or (self.custom.name if self.custom else None) or self.type


def kind_of_tool(value: Any) -> str:
    """Return the tag of a tool of OpenAI's forms. Without a type it is a function, whose error names the type."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return FUNCTION if kind in (None, "function") else OTHER


def refuse_choice(choice: OtherTool) -> RequestError:
    """Return the error for a choice of a tool that is left out."""
    said = f"tool_choice of type {choice.type!r} cannot be used: functions alone are called here; name a function"
    return RequestError(said, "tool_choice", "invalid_value")


class LeftOutNotes:
    """Tells of tools that were left out: every client by a header, the log once for each type."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def headers(self, use: ToolUse) -> dict[str, str]:
        """Return the headers of the answer to a request with these tools, and write to the log what is new."""
        if not use.left_out:
            return {}
        for kind in use.left_out:
            if kind not in self._logged and len(self._logged) < _MOST_LOGGED:
                self._logged.add(kind)
                log.warning("tools of type %s are left out: functions alone are called here (said once)", kind)
        return {HEADER: ", ".join(use.left_out)}


def types_of(tools: Sequence[OtherTool]) -> tuple[str, ...]:
    """Return the types of tools, each once, in order."""
    return tuple(sorted({tool.type for tool in tools}))
