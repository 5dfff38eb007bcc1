"""Input items of `/v1/responses`, and their translation to turns of a conversation."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from master.api.failures import RequestError
from master.api.forms import FormPart, call_arguments
from master.api.openai.chat_form import TextPart
from master.api.unused import SENT_BACK
from master.text.tokenizer import Message

_ROLES = {"developer": "system"}
_OWN = ("message", "function_call", "function_call_output", "item_reference")
_SKIPPED = frozenset({"reasoning", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "ghost_snapshot"})
"""Items without text for the model: reasoning of earlier turns, and items that only other servers use."""
_ARGUMENTS = ("input", "arguments", "action", "actions", "operation", "query")
"""Fields in which calls of tools that are not functions have their arguments."""


class InputItem(FormPart):
    """A message, a call of a function, or its result; or the id of an item of an earlier response."""

    harmless = SENT_BACK | {"caller"}

    type: str = "message"
    id: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[dict[str, Any]] | None = None


class OtherItem(FormPart):
    """An item of a tool that is not a function, or of another server."""

    model_config = ConfigDict(extra="allow")

    type: str


def _kind(value: Any) -> str:
    kind = value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", "message")
    return "own-item" if kind in _OWN or not isinstance(kind, str) else "other-item"


AnyItem = Annotated[
    Annotated[InputItem, Tag("own-item")] | Annotated[OtherItem, Tag("other-item")], Discriminator(_kind)
]
MOST_ITEMS = 10_000
AnyItems = Annotated[list[AnyItem], Field(min_length=1, max_length=MOST_ITEMS)]


def messages_of(items: Sequence[InputItem | OtherItem], known: Mapping[str, Message]) -> list[Message]:
    """Return the turns of a conversation; `known` has the turns of earlier items by id, for references to them.

    If the client ran a tool that is not a function, its calls appear like function calls, since the client sends the
    results. Calls that another server ran are skipped, because the message after them has the results.

    Raises:
        RequestError: if an item cannot be read; the message names it.
    """
    messages: list[Message] = []
    for index, item in enumerate(items):
        field = f"input[{index}]"
        if isinstance(item, OtherItem):
            _append_other(messages, item, field)
        else:
            _append(messages, item, field, known)
    return messages


def _append(messages: list[Message], item: InputItem, field: str, known: Mapping[str, Message]) -> None:
    """Append one item to the messages; a function call is added to the assistant's message before it."""
    if item.type == "message":
        if item.role is None or item.content is None:
            raise RequestError("a message needs role and content", field, "invalid_value")
        messages.append({"role": _ROLES.get(item.role, item.role), "content": _text(item.content, field)})
    elif item.type == "function_call":
        _append_call(messages, item, field)
    elif item.type == "function_call_output":
        if item.output is None:
            raise RequestError("a function_call_output needs an output", f"{field}.output", "invalid_value")
        messages.append(_result(item.call_id, item.output))
    elif (turn := known.get(item.id or "")) is not None:
        _append_known(messages, turn)
    else:
        said = f"item {(item.id or '')[:100]!r} is unknown or no longer stored; send the item itself"
        raise RequestError(f"{field}.id: {said}", f"{field}.id", "item_not_found", 404)


def _append_other(messages: list[Message], item: OtherItem, field: str) -> None:
    values: dict[str, Any] = item.model_extra or {}
    call_id = values.get("call_id")
    if item.type.endswith("_output") and (call_id or values.get("id")):
        messages.append(_result(call_id or values["id"], values.get("output", values.get("status"))))
    elif item.type.endswith("_call") and call_id:
        name = values.get("name")
        called = name if isinstance(name, str) and name else item.type.removesuffix("_call")
        _add_call(messages, str(call_id), called, _arguments(values))
    elif not (item.type.endswith("_call") or item.type in _SKIPPED):
        raise RequestError(
            f"items of type {item.type[:64]!r} are not supported; leave them out",
            f"{field}.type",
            "unsupported_content",
        )


def _arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of a tool that is not a function, as an object."""
    found = {name: values[name] for name in _ARGUMENTS if values.get(name) is not None}
    only = next(iter(found.values()), None)
    return {**only} if len(found) == 1 and isinstance(only, dict) else found


def _append_call(messages: list[Message], item: InputItem, field: str) -> None:
    arguments = call_arguments(item.arguments, f"{field}.arguments")
    _add_call(messages, item.call_id or "", item.name or "", arguments)


def _add_call(messages: list[Message], call_id: str, name: str, arguments: Any) -> None:
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    _append_known(messages, {"role": "assistant", "content": "", "tool_calls": [call]})


def _append_known(messages: list[Message], turn: Message) -> None:
    """Append a turn; calls directly after a message of the assistant are added to that message."""
    calls = turn.get("tool_calls")
    if calls and messages and messages[-1]["role"] == "assistant":
        last = messages.pop()
        messages.append({**last, "tool_calls": [*last.get("tool_calls", ()), *calls]})
    elif calls or turn["content"]:
        messages.append(turn)


def _result(call_id: Any, output: Any) -> Message:
    return {"role": "tool", "tool_call_id": str(call_id or ""), "content": result_text(output)}


def result_text(output: Any) -> str:
    """Return the result of a tool as text; parts that are not text are replaced by their type in brackets.

    The client cannot take a result back, so a picture in it must not make the request fail. The text tells the model
    that there was one.
    """
    if output is None or isinstance(output, str):
        return output or ""
    if not isinstance(output, list):
        return _part_text(output)
    return "\n".join(_part_text(part) for part in output)


def _part_text(part: Any) -> str:
    """Return one part of a result: its text, or else its content, its type (pictures, files) or its JSON."""
    found = part if isinstance(part, dict) else {}
    if isinstance(found.get("text"), str):
        return str(found["text"])
    if isinstance(found.get("content"), (str, list)):
        return result_text(found["content"])
    if isinstance(kind := found.get("type"), str):
        return f"[{kind}: this model reads text only]"
    return json.dumps(part, ensure_ascii=False)


def _text(content: str | Sequence[TextPart], field: str) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part.type not in ("text", "input_text", "output_text", "refusal"):
            raise RequestError(
                f"this model reads text only, not {part.type}", f"{field}.content", "unsupported_content"
            )
    return "".join(part.text or part.refusal or "" for part in content)
