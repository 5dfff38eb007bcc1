"""From an answer's text to what a client wants of it: plain text and tool calls, as they come."""

import json
from collections.abc import Sequence
from typing import Any, Protocol

from master.api.answers.events import Piece, TextPiece, ToolCall
from master.api.forms import problem_of

_NAMES = ("name", "function", "tool_name", "tool")
_ARGUMENTS = ("arguments", "parameters", "args", "input")


class ToolParser(Protocol):
    """Reads one answer. What is no call after all is text, as it stands."""

    def push(self, text: str) -> list[Piece]:
        """What is known to be text or a whole call once `text` has come."""

    def flush(self) -> list[Piece]:
        """The rest, at the end of the answer."""


class NoTools:
    """All of it is text."""

    def push(self, text: str) -> list[Piece]:
        """See `ToolParser`."""
        return [TextPiece(text)] if text else []

    def flush(self) -> list[Piece]:
        """See `ToolParser`."""
        return []


def calls_in(text: str, names: Sequence[str]) -> list[Piece] | None:
    """Return the calls that a JSON object, or an array of them, makes.

    None if the text is not a call, calls a tool that was not offered, or holds what `problem_of` refuses.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if problem_of(value) is not None:
        return None
    if isinstance(value, dict) and isinstance(value.get("tool_calls"), list):
        value = value["tool_calls"]
    found = [_call(one, names) for one in (value if isinstance(value, list) else [value])]
    return [call for call in found if call] if found and all(found) else None


def _call(value: Any, names: Sequence[str]) -> ToolCall | None:
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = next((value[key] for key in _NAMES if isinstance(value.get(key), str)), None)
    arguments: Any = next((value[key] for key in _ARGUMENTS if key in value), {})
    if name is None or (names and name not in names):
        return None
    if isinstance(arguments, str):  # some models write the arguments as a string of JSON
        return ToolCall(name, arguments) if is_object(arguments) else None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def is_object(text: str) -> bool:
    """Return whether `text` is a JSON object that a client can take."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and problem_of(value) is None
