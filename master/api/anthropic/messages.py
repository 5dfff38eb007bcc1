"""`POST /v1/messages` and `/v1/messages/count_tokens`, as in Anthropic's API reference."""

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from secrets import token_hex
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from master.api.answers.events import Ended, Event, ReasoningPiece, TextPiece, ToolCall
from master.api.answers.requests import GenerationOptions
from master.api.anthropic.form import CountForm, MessagesForm
from master.api.failures import ApiFailure, anthropic_form
from master.api.state import ApiState
from master.api.streams import Deadline, EventStream, cancel_on_disconnect, collected, data, guarded, merged
from master.api.unsupported_tools import FIELDS_HEADER

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "cancelled": "end_turn"}


def message_routes(state: ApiState) -> APIRouter:
    """Return the routes of Anthropic's API, for the application."""
    router = APIRouter()

    @router.post("/v1/messages", summary="Answer a conversation (Anthropic)")
    async def messages(form: MessagesForm, request: Request) -> Response:
        model = state.named(form.model)
        ask = form.ask(state.client(request))
        deadline = Deadline(state.limits.answer_s)
        ignored = await cancel_on_disconnect(request, state.service.ignored_settings(ask), deadline)
        answers = await cancel_on_disconnect(request, state.service.chat(ask), deadline)
        blocks, headers = Blocks(model), state.left_out.headers(ask.use) | _ignored_headers(ignored)
        if form.stream:
            events = _stream((event async for _, event in merged(answers)), blocks, answers[0].prompt_tokens)
            return EventStream(guarded(events, answers, deadline, _failed), answers, headers)
        (got,) = await cancel_on_disconnect(request, collected(answers), deadline)
        for event in got:
            list(blocks.push(event))
        return JSONResponse(blocks.message(), headers=headers)

    @router.post("/v1/messages/count_tokens", summary="Count the tokens of a conversation (Anthropic)")
    async def count_tokens(form: CountForm, request: Request) -> Response:
        state.named(form.model)
        ask = form.asked(GenerationOptions(), state.client(request))
        count = await cancel_on_disconnect(request, state.service.count(ask), Deadline(state.limits.answer_s))
        return JSONResponse({"input_tokens": count}, headers=state.left_out.headers(ask.use))

    return router


def _ignored_headers(ignored: Sequence[str]) -> dict[str, str]:
    fields = ["output_config.effort" if name == "effort" else name for name in ignored]
    return {FIELDS_HEADER: ", ".join(fields)} if fields else {}


class Blocks:
    """The content blocks of a message, built from events, and the stream events that report them."""

    def __init__(self, model: str) -> None:
        self._base: dict[str, Any] = {
            "id": f"msg_{token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._content: list[dict[str, Any]] = []
        self._open = False
        self._ended: Ended | None = None

    def message(self) -> dict[str, Any]:
        """Return the complete message."""
        assert self._ended
        content = self._content or [{"type": "text", "text": ""}]
        return self._base | {"content": content, **self._stop(), "usage": _usage(self._ended)}

    def first_event(self, prompt_tokens: int) -> dict[str, Any]:
        """Return the first stream event, which has the number of prompt tokens."""
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return {"type": "message_start", "message": self._base | empty}

    def push(self, event: Event) -> Iterator[dict[str, Any]]:
        """Add one event to the message and yield the stream events that report it."""
        if isinstance(event, ReasoningPiece):
            yield from self._grow("thinking", event.text)
        elif isinstance(event, TextPiece):
            yield from self._grow("text", event.text)
        elif isinstance(event, ToolCall):
            yield from self._close()
            yield from self._call(event)
        else:
            yield from self._close()
            self._ended = event
            yield {"type": "message_delta", "delta": self._stop(), "usage": _usage(event)}
            yield {"type": "message_stop"}

    def _grow(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if not self._open or self._content[-1]["type"] != kind:
            yield from self._close()
            block = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
            yield from self._begin(block)
        self._content[-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _call(self, call: ToolCall) -> Iterator[dict[str, Any]]:
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        yield from self._begin(block)
        yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        self._content[-1]["input"] = json.loads(call.arguments)
        yield from self._close()

    def _begin(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self._content.append(block)
        self._open = True
        yield {"type": "content_block_start", "index": len(self._content) - 1, "content_block": dict(block)}

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._open:
            self._open = False
            yield {"type": "content_block_stop", "index": len(self._content) - 1}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _stop(self) -> dict[str, Any]:
        assert self._ended
        stopped = self._ended.stop_text
        reason = "stop_sequence" if stopped is not None else _REASONS[self._ended.reason]
        return {"stop_reason": reason, "stop_sequence": stopped}


def _usage(ended: Ended) -> dict[str, Any]:
    """Return the token counts in Anthropic's form, which counts tokens with a reused KV cache separately."""
    return {
        "input_tokens": ended.prompt_tokens - ended.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": ended.cached,
        "output_tokens": ended.completion_tokens,
    }


async def _stream(events: AsyncIterator[Event], blocks: Blocks, prompt_tokens: int) -> AsyncIterator[str]:
    yield _sent(blocks.first_event(prompt_tokens))
    async for event in events:
        for said in blocks.push(event):
            yield _sent(said)


def _sent(event: dict[str, Any]) -> str:
    return data(event, str(event["type"]))


def _failed(failure: ApiFailure) -> list[str]:
    return [data(anthropic_form(failure), "error")]
