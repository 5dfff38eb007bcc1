"""The output of a response: items that are built from events, and the stream events that report them."""

import json
import time
from collections.abc import Sequence
from itertools import count
from secrets import token_hex
from typing import Any

from master.api.answers.events import Ended, Event, ReasoningPiece, TextPiece, TokenLogprob, ToolCall
from master.api.openai.common import chat_logprobs, timings
from master.api.openai.responses_form import ResponsesForm
from master.text.tokenizer import Message

Sent = dict[str, Any]


class Items:
    """One response in progress. Its methods return the stream events to send."""

    def __init__(self, form: ResponsesForm, model: str, effort: str | None = None) -> None:
        """Create a response; `effort` is the reasoning effort that the model was told, if any."""
        self.id = f"resp_{token_hex(12)}"
        self._form, self._model, self._effort = form, model, effort
        self._created = int(time.time())
        self._numbers = count()
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the item in progress
        self._text, self._logprobs = "", list[Sent]()
        self._ended: Ended | None = None

    def first_events(self) -> list[Sent]:
        """Return the stream events that precede all output."""
        whole = self.response("in_progress")
        return [self._event("response.created", response=whole), self._event("response.in_progress", response=whole)]

    def push(self, event: Event) -> list[Sent]:
        """Add one event to the response and return the stream events that report it."""
        if isinstance(event, ReasoningPiece):
            return self._grow("reasoning", event.text)
        if isinstance(event, TextPiece):
            return self._grow("message", event.text, event.logprobs)
        if isinstance(event, Ended) and self._open and self._open["type"] == "message":
            self._logprobs += self._said(event.logprobs)
        done = self._close()
        if isinstance(event, ToolCall):
            return done + self._call(event)
        self._ended = event
        return done

    def completed(self) -> Sent:
        """Return the last stream event of a complete response."""
        whole = self.response()
        return self._event(f"response.{whole['status']}", response=whole)

    def failed(self, code: str, message: str) -> Sent:
        """Return the stream event for a failure, which ends the response."""
        whole = self.response("failed") | {"error": {"code": code, "message": message}}
        return self._event("response.failed", response=whole)

    def message(self) -> Message:
        """Return the answer as a turn of the conversation."""
        calls = [_call_of(item) for item in self._output if item["type"] == "function_call"]
        said = "".join(part["text"] for item in self._output if item["type"] == "message" for part in item["content"])
        return {"role": "assistant", "content": said} | ({"tool_calls": calls} if calls else {})

    def turns(self) -> dict[str, Message]:
        """Return each item as a turn of the conversation, by item id; reasoning becomes an empty turn."""
        found: dict[str, Message] = {}
        for item in self._output:
            said = "".join(part["text"] for part in item["content"]) if item["type"] == "message" else ""
            calls = {"tool_calls": [_call_of(item)]} if item["type"] == "function_call" else {}
            found[item["id"]] = {"role": "assistant", "content": said, **calls}
        return found

    def response(self, status: str | None = None) -> dict[str, Any]:
        """Return the response object with the output so far."""
        cut = self._ended is not None and self._ended.reason == "length"
        form = self._form
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status or ("incomplete" if cut else "completed"),
            "model": self._model,
            "output": list(self._output),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": form.instructions,
            "max_output_tokens": form.max_output_tokens,
            "metadata": form.metadata or {},
            "parallel_tool_calls": form.parallel_tool_calls is not False,
            "previous_response_id": form.previous_response_id,
            "reasoning": {"effort": self._effort, "summary": None},
            "temperature": form.temperature,
            "top_logprobs": form.top_logprobs or 0,
            "top_p": form.top_p,
            "text": {"format": _format(form)} | _if_asked(form.text and form.text.verbosity, verbosity="medium"),
            "tool_choice": _choice(form),
            "tools": [tool.model_dump(exclude_none=True) for tool in form.functions],
            "truncation": "disabled",
            "usage": self._usage(),
            **_if_asked(form.service_tier, service_tier="default"),
        } | ({"timings": timings(self._ended)} if self._ended else {})

    def _usage(self) -> dict[str, Any] | None:
        if (ended := self._ended) is None:
            return None
        return {
            "input_tokens": ended.prompt_tokens,
            "input_tokens_details": {"cached_tokens": ended.cached},
            "output_tokens": ended.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": ended.reasoning_tokens},
            "total_tokens": ended.prompt_tokens + ended.completion_tokens,
        }

    def _grow(self, kind: str, text: str, logprobs: Sequence[TokenLogprob] = ()) -> list[Sent]:
        """Add text to the message or reasoning in progress, or to a new one if an item of another type is in
        progress.
        """
        said = [] if self._open and self._open["type"] == kind else self._close() + self._begin(kind)
        assert self._open is not None
        tokens = self._said(logprobs)
        self._text, self._logprobs = self._text + text, self._logprobs + tokens
        name = "response.output_text.delta" if kind == "message" else "response.reasoning_text.delta"
        more: dict[str, Any] = {"logprobs": tokens} if kind == "message" else {}
        return [*said, self._of_item(name, self._open, content_index=0, delta=text, **more)]

    def _begin(self, kind: str) -> list[Sent]:
        item: dict[str, Any] = {"type": kind, "status": "in_progress", "content": []}
        item["id"] = f"{'msg' if kind == 'message' else 'rs'}_{token_hex(12)}"
        own: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
        item |= own
        self._open, self._text, self._logprobs = item, "", []
        said = [self._event("response.output_item.added", output_index=len(self._output), item=dict(item))]
        part = self._of_item("response.content_part.added", item, content_index=0, part=_part(kind, "", []))
        return [*said, part]

    def _close(self) -> list[Sent]:
        """Complete the item in progress, and return the stream events that report it."""
        item, self._open = self._open, None
        if item is None:
            return []
        kind, part = item["type"], _part(item["type"], self._text, self._logprobs)
        name = "response.output_text.done" if kind == "message" else "response.reasoning_text.done"
        more: dict[str, Any] = {"logprobs": self._logprobs} if kind == "message" else {}
        said = [
            self._of_item(name, item, content_index=0, text=self._text, **more),
            self._of_item("response.content_part.done", item, content_index=0, part=part),
        ]
        return said + self._done(item | {"content": [part], "status": "completed"})

    def _call(self, call: ToolCall) -> list[Sent]:
        item: dict[str, Any] = {
            "type": "function_call",
            "id": f"fc_{token_hex(12)}",
            "call_id": call.id,
            "name": call.name,
        }
        begun: dict[str, Any] = item | {"arguments": "", "status": "in_progress"}
        name = "response.function_call_arguments"
        return [
            self._event("response.output_item.added", output_index=len(self._output), item=begun),
            self._of_item(f"{name}.delta", begun, delta=call.arguments),
            self._of_item(f"{name}.done", begun, arguments=call.arguments, name=call.name),
            *self._done(item | {"arguments": call.arguments, "status": "completed"}),
        ]

    def _done(self, item: dict[str, Any]) -> list[Sent]:
        said = self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        return [said]

    def _of_item(self, kind: str, item: dict[str, Any], **more: Any) -> Sent:
        return self._event(kind, item_id=item["id"], output_index=len(self._output), **more)

    def _event(self, kind: str, **more: Any) -> Sent:
        return {"type": kind, "sequence_number": next(self._numbers), **more}

    def _said(self, logprobs: Sequence[TokenLogprob]) -> list[Sent]:
        content: list[Sent] = chat_logprobs(logprobs)["content"] if self._form.with_logprobs else []
        return content


def _call_of(item: dict[str, Any]) -> dict[str, Any]:
    function = {"name": item["name"], "arguments": json.loads(item["arguments"])}
    return {"id": item["call_id"], "type": "function", "function": function}


def _if_asked(asked: object, **fields: Any) -> dict[str, Any]:
    return fields if asked else {}


def _choice(form: ResponsesForm) -> str | dict[str, Any]:
    choice = form.tool_choice
    return choice if isinstance(choice, str) else choice.model_dump(exclude_none=True) if choice else "auto"


def _format(form: ResponsesForm) -> dict[str, Any]:
    if form.text is None or form.text.format is None:
        return {"type": "text"}
    return form.text.format.model_dump(by_alias=True, exclude_none=True)


def _part(kind: str, text: str, logprobs: Sequence[Sent]) -> dict[str, Any]:
    if kind == "message":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
    return {"type": "reasoning_text", "text": text}
