"""The interface of tool parsers, which divide an answer's text into plain text and tool calls as it comes."""

import json
from collections.abc import Sequence
from typing import Any, Protocol

from master.api.answers.events import Piece, TextPiece, ToolCall
from master.api.forms import problem_of

_NAMES = ("name", "function", "tool_name", "tool")
_ARGUMENTS = ("arguments", "parameters", "args", "input")


class ToolParser(Protocol):
    """A parser of one answer. Text that turns out not to be a call is returned unchanged."""

    def push(self, text: str) -> list[Piece]:
        """Parse `text`; return the plain text and the complete calls that later text cannot change."""

    def flush(self) -> list[Piece]:
        """Return the text that was held back, at the end of the answer."""


class NoTools:
    """A parser for which everything is plain text."""

    def push(self, text: str) -> list[Piece]:
        """Return `text` as it is."""
        return [TextPiece(text)] if text else []

    def flush(self) -> list[Piece]:
        """Return an empty list, because no text is held back."""
        return []


def calls_in(text: str, names: Sequence[str]) -> list[Piece] | None:
    """Return the calls in a JSON object, or in an array of such objects.

    Return None if the text is not a call, calls a tool that was not offered, or is refused by `problem_of`.
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
    if len(value) == 1 and isinstance(next(iter(value.values())), dict) and names and next(iter(value)) in names:
        ((called, given),) = value.items()  # Apertus writes {"NAME": {...}}
        return ToolCall(called, json.dumps(given, ensure_ascii=False))
    name = next((value[key] for key in _NAMES if isinstance(value.get(key), str)), None)
    arguments: Any = next((value[key] for key in _ARGUMENTS if key in value), {})
    if name is None or (names and name not in names):
        return None
    if isinstance(arguments, str):  # some models write the arguments as a string of JSON
        return ToolCall(name, arguments) if is_object(arguments) else None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def is_object(text: str) -> bool:
    """Return True if `text` is a JSON object that clients can read."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and problem_of(value) is None
