"""Tools that are not functions: they are not passed on to the model, and the client is told so.

Clients offer the tools of their usual servers, such as web search or a shell. Refusing such requests would exclude
these clients. The models of this project are not trained to use such tools.
"""

import logging
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from master.api.answers.requests import ToolOptions
from master.api.failures import RequestError
from master.api.forms import FormPart

HEADER = "X-TPI-Left-Out-Tools"
FIELDS_HEADER = "X-TPI-Left-Out-Fields"
FUNCTION, OTHER = "function-tool", "other-tool"  # pydantic's tags for the two branches of a union of tools
_MOST_LOGGED = 64  # limit of logged types, because a client can invent any number of them

log = logging.getLogger("tpi.serve")


class Named(FormPart):
    """The name inside a tool of OpenAI's chat completions."""

    model_config = ConfigDict(extra="ignore")

    name: str | None = Field(None, max_length=128)


class OtherTool(FormPart):
    """A tool that is not a function, or the choice of one. Its other fields are not read."""

    model_config = ConfigDict(extra="ignore")

    type: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:/-]{1,64}$")]
    name: str | None = Field(None, max_length=128)
    custom: Named | None = None

    @property
    def called(self) -> str:
        """The tool's name, or its type if it has no name."""
        return self.name or (self.custom.name if self.custom else None) or self.type


def kind_of_tool(value: Any) -> str:
    """Return the tag by which pydantic chooses the form of a tool: of a function, or of any other tool.

    A tool without a type counts as a function, so that the client gets the error that the type is missing.
    """
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return FUNCTION if kind in (None, "function") else OTHER


def refuse_choice(choice: OtherTool) -> RequestError:
    """Return the error for choosing a tool that is left out."""
    said = f"tool_choice of type {choice.type!r} cannot be used, because only functions can be called; name a function"
    return RequestError(said, "tool_choice", "invalid_value")


class UnsupportedToolReports:
    """Reports of tools that are left out: to each client in a header, to the log once for each type."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def headers(self, use: ToolOptions) -> dict[str, str]:
        """Return the response headers that name the left-out tools of a request. Log each type only once."""
        if not use.left_out:
            return {}
        for kind in use.left_out:
            if kind not in self._logged and len(self._logged) < _MOST_LOGGED:
                self._logged.add(kind)
                log.warning("tools of type %s are left out, because only functions can be called (logged once)", kind)
        return {HEADER: ", ".join(use.left_out)}


def types_of(tools: Sequence[OtherTool]) -> tuple[str, ...]:
    """Return the types of the tools, sorted, without duplicates."""
    return tuple(sorted({tool.type for tool in tools}))
