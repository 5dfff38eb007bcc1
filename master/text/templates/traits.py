"""The abilities of a chat template, found by rendering short conversations, because its source is hard to analyse.

Each trait is determined when it is first read.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, Literal

from master.text.templates.calls import IDS, CallMarks, Calls, learn, learn_reasoning
from tpi.errors import ModelError

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], Mapping[str, Any]], str]
"""Renders messages, with further names for the template; raises ModelError if it refuses them."""

ToolPlace = Literal["name", "system", "system as text", "nowhere"]
"""Where a template reads tools: a name of its own, or the field `tools` of the system message, perhaps as JSON."""

_SYSTEM, _USER, _ANSWER, _AGAIN, _RESULT = "tpisystem", "tpiuser", "tpianswer", "tpiagain", "tpiresult"
_NAME, _KEY, _VALUE = "tpitool", "tpikey", "tpivalue"
_PARAMETERS = {"type": "object", "properties": {_KEY: {"type": "string", "description": "A word."}}, "required": [_KEY]}
_TOOL = {"name": _NAME, "description": "Looks a word up.", "parameters": _PARAMETERS}
EFFORT = "reasoning_effort"
"""The name of the setting for how much to think."""
SWITCHES = ("enable_thinking", "thinking")
"""Names of settings for whether to think."""
_TRIED: Mapping[str, tuple[object, object]] = {EFFORT: ("low", "high"), **dict.fromkeys(SWITCHES, (True, False))}
LONG_ID, SHORT_ID = "call_0123456789abcdef01234567", "a1b2c3d4e"


@dataclass(frozen=True)
class CallForm:
    """The form in which a template takes the calls of an assistant's message.

    Attributes:
        as_text: whether arguments are JSON text rather than objects.
        null: whether a message without text must have the content None, because the template would show an empty text
            as a turn, or leave out the calls.
        with_text: whether a message may have both text and calls.
        short_ids: whether ids have nine letters and digits, as Mistral's templates demand.
    """

    as_text: bool = False
    null: bool = True
    with_text: bool = True
    short_ids: bool = False


class Traits:
    """The traits of one chat template, called "the template" below."""

    def __init__(self, render: Render) -> None:
        self._render = render

    @cached_property
    def works(self) -> bool:
        """True if the template renders a short question. If not, rendering the real conversation shows the error."""
        return self._shows([_turn("user", _USER)], _USER) or self.parts

    @cached_property
    def parts(self) -> bool:
        """True if the content of a message must be a list of parts."""
        asked = _turn("user", _USER)
        return not self._shows([asked], _USER) and self._shows([in_parts(asked)], _USER)

    @cached_property
    def system(self) -> bool:
        """True if the template shows a system message at the beginning."""
        return self._takes([_turn("system", _SYSTEM), _turn("user", _USER)], _SYSTEM, _USER)

    @cached_property
    def system_alone(self) -> bool:
        """True if the template shows a system message that no other message follows."""
        return self._takes([_turn("system", _SYSTEM)], _SYSTEM)

    @cached_property
    def later_system(self) -> bool:
        """True if the template shows further system messages, at any place."""
        turns = [_turn("system", _SYSTEM), _turn("system", _ANSWER), _turn("user", _USER)]
        later = [_turn("user", _USER), _turn("assistant", _ANSWER), _turn("system", _SYSTEM), _turn("user", _AGAIN)]
        return self._takes(turns, _SYSTEM, _ANSWER) and self._takes(later, _SYSTEM, _AGAIN)

    @cached_property
    def repeated_user(self) -> bool:
        """True if the template accepts two messages of the user in a row."""
        return self._takes([_turn("user", _USER), _turn("user", _AGAIN)], _USER, _AGAIN)

    @cached_property
    def repeated_assistant(self) -> bool:
        """True if the template accepts two messages of the assistant in a row."""
        turns = [_turn("user", _USER), _turn("assistant", _ANSWER), _turn("assistant", _AGAIN), _turn("user", _RESULT)]
        return self._takes(turns, _ANSWER, _AGAIN)

    @cached_property
    def assistant_first(self) -> bool:
        """True if the template accepts a message of the assistant at the beginning."""
        return self._takes([_turn("assistant", _ANSWER), _turn("user", _USER)], _ANSWER, _USER)

    def tools(self, with_system: bool) -> ToolPlace:
        """Return the name under which the template reads tools, in a conversation with or without system message."""
        return self._tools_with_system if with_system else self._tools_alone

    @property
    def tells_tools(self) -> bool:
        """True if the template shows tools to the model in any conversation."""
        return (self._tools_alone, self._tools_with_system) != ("nowhere", "nowhere")

    @cached_property
    def calls(self) -> CallForm | None:
        """The form in which the template takes calls and their results; None if it shows no calls."""
        for short, as_text, empty in product((False, True), (False, True), (True, False)):
            form = CallForm(as_text, empty, True, short)
            if self._shows_calls(form, None if empty else ""):
                return form if self._shows_calls(form, _ANSWER) else replace(form, with_text=False)
        return None

    def _shows_calls(self, form: CallForm, content: str | None) -> bool:
        shown = self._tried([self._fitted(message) for message in _call(form, content)])
        words = all(word in shown for word in (_NAME, _VALUE, _RESULT, content or ""))
        # a template of another form writes an object or None in Python's syntax
        return words and f"'{_KEY}'" not in shown and "None" not in shown

    @cached_property
    def several_calls(self) -> bool:
        """True if the template shows all calls of a message that has several."""
        form = self.calls
        if form is None:
            return False
        asked, called, answered = _call(form, None if form.null else "")
        (first,) = called["tool_calls"]
        function = {"name": _AGAIN, "arguments": first["function"]["arguments"]}
        both = {**called, "tool_calls": [first, {**first, "function": function}]}
        return self._shows([self._fitted(message) for message in (asked, both, answered)], _NAME, _AGAIN)

    @cached_property
    def call_marks(self) -> CallMarks | None:
        """The marks around calls in the template's renderings; None if the renderings do not show the marks."""
        form = self.calls
        if form is None:
            return None

        def show(content: str | None, calls: Calls) -> str:
            return self._tried([self._fitted(message) for message in _called(form, content, calls)])

        return learn(show, self.several_calls, form.with_text)

    @cached_property
    def reasoning_tags(self) -> tuple[str, str] | None:
        """The tags around reasoning in the template's renderings; None if it does not show reasoning."""
        asked, answered = self._fitted(_turn("user", _USER)), self._fitted(_turn("assistant", _ANSWER))
        shown = self._tried([asked, {**answered, "reasoning_content": _AGAIN, "reasoning": _AGAIN}])
        return learn_reasoning(self._tried([asked, answered]), shown, _AGAIN, _ANSWER)

    @cached_property
    def user_after_result(self) -> bool:
        """True if a user's message may follow a result before the assistant has answered it."""
        if (form := self.calls) is None:
            return True
        turns = [*_call(form, None if form.null else ""), _turn("user", _AGAIN)]
        return self._takes(turns, _RESULT, _AGAIN)

    @cached_property
    def results(self) -> bool:
        """True if the template shows a tool's result as a message of its own."""
        result = {**_turn("tool", _RESULT), "tool_call_id": SHORT_ID}
        turns = [_turn("user", _USER), _turn("assistant", _ANSWER), result]
        known = self.calls is not None or self.tells_tools
        return known and self._shows([self._fitted(turn) for turn in turns], _RESULT)

    @cached_property
    def switches(self) -> frozenset[str]:
        """The names of the settings for thinking that the template obeys."""
        asked = [self._fitted(_turn("user", _USER))]
        return frozenset(
            name
            for name, (one, other) in _TRIED.items()
            if self.works and self._tried(asked, **{name: one}) != self._tried(asked, **{name: other})
        )

    @cached_property
    def _tools_alone(self) -> ToolPlace:
        asked = [self._fitted(_turn("user", _USER))]
        return "name" if self.works and _NAME in self._tried(asked, tools=wrapped([_TOOL])) else "nowhere"

    @cached_property
    def _tools_with_system(self) -> ToolPlace:
        if not self.system:
            return "nowhere"
        asked = [self._fitted(_turn("system", _SYSTEM)), self._fitted(_turn("user", _USER))]
        if _NAME in self._tried(asked, tools=wrapped([_TOOL])):
            return "name"
        listed: Sequence[tuple[ToolPlace, Any]] = (("system", wrapped([_TOOL])), ("system as text", written([_TOOL])))
        for place, tools in listed:
            shown = self._tried([{**asked[0], "tools": tools}, asked[1]])
            if _NAME in shown and f"'{_NAME}'" not in shown:
                return place
        return "nowhere"

    def _takes(self, messages: Sequence[Message], *words: str) -> bool:
        """Return True if the template shows `words` of a conversation, or fails with every conversation.

        If the template fails with every conversation, the traits do not matter, because the real conversation fails
        too.
        """
        return not self.works or self._shows([self._fitted(message) for message in messages], *words)

    def _shows(self, messages: Sequence[Message], *words: str) -> bool:
        shown = self._tried(messages)
        return all(word in shown for word in words)

    def _fitted(self, message: Message) -> Message:
        return in_parts(message) if self.parts else message

    def _tried(self, messages: Sequence[Message], **names: Any) -> str:
        try:
            return self._render(messages, names)
        except ModelError:
            return ""


def joined(messages: Sequence[Message]) -> str:
    """Return the conversation for a model without a chat template; tool messages are left out."""
    return "\n".join(message.get("content") or "" for message in messages if message["role"] != "tool")


def wrapped(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools as the list of OpenAI's API, which templates take."""
    return [{"type": "function", "function": dict(tool)} for tool in tools]


def written(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return tools as JSON text."""
    return json.dumps([dict(tool) for tool in tools], ensure_ascii=False)


def in_parts(message: Message) -> Message:
    """Return a message whose content is a list of one part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _turn(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _call(form: CallForm, content: str | None) -> list[Message]:
    arguments: Any = {_KEY: _VALUE}
    id_ = SHORT_ID if form.short_ids else LONG_ID
    function = {"name": _NAME, "arguments": json.dumps(arguments) if form.as_text else arguments}
    calls = [{"id": id_, "type": "function", "function": function}]
    return [
        _turn("user", _USER),
        {"role": "assistant", "content": content, "tool_calls": calls},
        {"role": "tool", "tool_call_id": id_, "content": _RESULT},
    ]


def _called(form: CallForm, content: str | None, calls: Calls) -> list[Message]:
    """Return a conversation with a message of `calls` and their results; without calls, only the message."""
    content = content if content is not None or form.null else ""
    if not calls:
        return [_turn("user", _USER), {"role": "assistant", "content": content}, _turn("user", _AGAIN)]
    made = [
        {
            "id": id_,
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(dict(given)) if form.as_text else dict(given)},
        }
        for id_, (name, given) in zip(IDS, calls, strict=False)
    ]
    results = [{"role": "tool", "tool_call_id": id_, "content": _RESULT} for id_ in IDS[: len(made)]]
    return [_turn("user", _USER), {"role": "assistant", "content": content, "tool_calls": made}, *results]
