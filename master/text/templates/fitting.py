"""Fitting a conversation to a chat template: a message of a kind that it does not show joins another turn."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import takewhile
from typing import Any

from master.text.templates.traits import CallForm, Message, Traits, in_parts, wrapped, written

_ID = 9  # letters and digits of a short id
_BETWEEN = "\n\n"


@dataclass(frozen=True)
class Turn:
    """A message for the template. `index` is the original message's index; None if it was made from several."""

    message: Message
    index: int | None = None

    @property
    def role(self) -> str:
        """The role of the message, such as `user`."""
        return str(self.message["role"])

    @property
    def content(self) -> str:
        """The content of the message as text."""
        return str(self.message.get("content") or "")

    def __add__(self, text: str) -> "Turn":
        """Return this turn with `text` appended to its content."""
        content = _BETWEEN.join(filter(None, (self.content, text)))
        return Turn({**self.message, "content": content})


def fitted(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], traits: Traits
) -> tuple[list[Turn], dict[str, Any]]:
    """Return `messages` and `tools` as turns that the template accepts, and as variables for the template."""
    turns = list(_with_calls(_one_by_one(messages, traits), traits))
    turns, names = _with_tools(turns, tools, traits)
    turns = list(_alternating(_with_system(turns, traits), traits))
    if traits.parts:
        turns = [Turn(in_parts(turn.message)) for turn in turns]
    return turns, names


def description(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return a text that describes the tools, for a model whose template does not show tools."""
    listed = "\n".join(json.dumps(dict(tool), ensure_ascii=False) for tool in tools)
    # the same text whether or not the request requires a call, so that the prefix cache can be used
    how = "To call one, answer with a JSON object and nothing else"
    return f'You can call these tools:\n{listed}\n{how}: {{"name": TOOL, "arguments": {{...}}}}'


def _one_by_one(messages: Sequence[Message], traits: Traits) -> Iterator[Turn]:
    """Yield the messages as turns; if the template cannot show several calls in a message, divide such messages.

    Each call then becomes a message of its own, followed by the call's result.
    """
    moved = set[int]()  # results that already follow their calls
    for index, message in enumerate(messages):
        calls = message.get("tool_calls") or ()
        if len(calls) < 2 or traits.calls is None or traits.several_calls:
            if index not in moved:
                yield Turn(message, index)
            continue
        results = [*takewhile(lambda at: messages[at]["role"] == "tool", range(index + 1, len(messages)))]
        for place, call in enumerate(calls):
            content = message.get("content") if place == 0 else ""
            yield Turn({**message, "content": content, "tool_calls": [call]})
            for at in results:
                if messages[at].get("tool_call_id") == call.get("id") and at not in moved:
                    moved.add(at)
                    yield Turn(messages[at], at)


def _with_calls(turns: Iterable[Turn], traits: Traits) -> Iterator[Turn]:
    """Yield the turns with calls and results in the template's form, or as text if the template shows no calls."""
    spelled = set[str]()  # ids of calls that became text, so that their results become text too
    for turn in turns:
        message = turn.message
        if message.get("tool_calls"):
            form = traits.calls
            if form is None or not _is_sound(message) or (turn.content and not form.with_text):
                if form is not None:
                    spelled.update(call.get("id", "") for call in message["tool_calls"])
                yield replace(turn, message=_spelled(message))
            else:
                yield replace(turn, message=_formed(message, form))
        elif turn.role == "tool":
            id_ = str(message.get("tool_call_id", ""))
            if id_ in spelled or not traits.results:
                yield Turn({"role": "user", "content": f"The tool answered: {turn.content}"}, turn.index)
            elif traits.calls is not None and traits.calls.short_ids:
                yield replace(turn, message={**message, "tool_call_id": _short(id_)})
            else:
                yield turn
        else:
            yield turn


def _is_sound(message: Message) -> bool:
    """Return True if the arguments of all calls are objects; an answer that was cut off may have other text."""
    return all(isinstance(call["function"]["arguments"], dict) for call in message["tool_calls"])


def _spelled(message: Message) -> Message:
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"]]
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": "\n".join(filter(None, (message.get("content"), *calls)))}


def _formed(message: Message, form: CallForm) -> Message:
    content = message.get("content") or (None if form.null else "")
    return {**message, "content": content, "tool_calls": [_call(call, form) for call in message["tool_calls"]]}


def _call(call: Mapping[str, Any], form: CallForm) -> dict[str, Any]:
    function = dict(call["function"])
    if form.as_text:
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    id_ = {"id": _short(call["id"])} if form.short_ids and "id" in call else {}
    return {**call, **id_, "function": function}


def _short(id_: str) -> str:
    """Return an id of nine letters and digits: `id_` itself if it is one, else a hash of it."""
    return id_ if len(id_) == _ID and id_.isalnum() and id_.isascii() else sha256(id_.encode()).hexdigest()[:_ID]


def _with_tools(
    turns: list[Turn], tools: Sequence[Mapping[str, Any]], traits: Traits
) -> tuple[list[Turn], dict[str, Any]]:
    if not tools:
        return turns, {}
    has_system = bool(turns) and turns[0].role == "system"
    place = traits.tools(has_system)
    if place == "nowhere" and not has_system and traits.tools(True) != "nowhere":
        turns, place = [Turn({"role": "system", "content": ""}), *turns], traits.tools(True)
    if place == "nowhere" and has_system and traits.tools(False) != "nowhere":
        turns, place = _folded(turns[:1], turns[1:]), traits.tools(False)
    if place == "name":
        return turns, {"tools": wrapped(tools)}
    if place == "nowhere":
        said = description(tools)
        first = turns[0] + said if has_system else Turn({"role": "system", "content": said})
        return [first, *turns[has_system:]], {}
    given = wrapped(tools) if place == "system" else written(tools)
    return [Turn({**turns[0].message, "tools": given}), *turns[1:]], {}


def _with_system(turns: Sequence[Turn], traits: Traits) -> list[Turn]:
    """Return the turns with one system message at the beginning, or as part of the user's first message.

    A later system message that the template does not accept becomes a user message.
    """
    leading = next((place for place, turn in enumerate(turns) if turn.role != "system"), len(turns))
    first, rest = list(turns[:leading]), list(turns[leading:])
    if len(first) > 1 and not (traits.system and traits.later_system):
        merged = first[0]
        for turn in first[1:]:
            merged = merged + turn.content
        first = [merged]
    if any(turn.role == "system" for turn in rest) and not traits.later_system:
        rest = [Turn({**turn.message, "role": "user"}) if turn.role == "system" else turn for turn in rest]
    if not first or (traits.system if rest else traits.system_alone):
        return first + rest
    return _folded(first, rest)


def _folded(first: Sequence[Turn], rest: Sequence[Turn]) -> list[Turn]:
    said = first[0].content
    if rest and rest[0].role == "user":
        asked = rest[0]
        return [Turn({**asked.message, "content": _BETWEEN.join(filter(None, (said, asked.content)))}), *rest[1:]]
    return [Turn({"role": "user", "content": said}), *rest]


def _alternating(turns: Sequence[Turn], traits: Traits) -> Iterator[Turn]:
    """Yield the turns, merging consecutive turns of the same role unless the template accepts several."""
    leading = next((turn for turn in turns if turn.role != "system"), None)
    silent = leading is not None and leading.role == "assistant" and not traits.assistant_first
    before: Turn | None = None
    for turn in turns:
        if turn is leading and silent:
            if before is not None:
                yield before
            before = Turn({"role": "user", "content": ""})
        if before is not None and _is_one(before, turn, traits):
            before = Turn({**before.message, **turn.message, "content": (before + turn.content).content})
            continue
        if before is not None:
            yield before
        if before is not None and (before.role, turn.role) == ("tool", "user") and not traits.user_after_result:
            yield Turn({"role": "assistant", "content": ""})
        before = turn
    if before is not None:
        yield before


def _is_one(before: Turn, turn: Turn, traits: Traits) -> bool:
    if before.role != turn.role or before.message.get("tool_calls") or turn.message.get("tool_calls"):
        return False
    return (turn.role == "user" and not traits.repeated_user) or (
        turn.role == "assistant" and not traits.repeated_assistant
    )
