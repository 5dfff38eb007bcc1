"""`POST /v1/chat/completions`, as in OpenAI's API reference."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from master.api.answers.answering import PendingAnswer
from master.api.answers.events import Ended, Event, ReasoningPiece, TextPiece, TokenLogprob, ToolCall
from master.api.openai.chat_form import ChatForm
from master.api.openai.common import DONE, chat_logprobs, failed, identity, timings, usage
from master.api.state import ApiState
from master.api.streams import Deadline, EventStream, cancel_on_disconnect, collected, data, guarded, merged


def chat_routes(state: ApiState) -> APIRouter:
    """Return the routes of chat completions, for the application."""
    router = APIRouter()

    @router.post("/v1/chat/completions", summary="Answer a conversation")
    async def chat_completions(form: ChatForm, request: Request) -> Response:
        model = state.named(form.model)
        deadline = Deadline(state.limits.answer_s)
        ask = form.ask(state.client(request, *form.salts()))
        answers = await cancel_on_disconnect(request, state.service.chat(ask), deadline)
        headers = state.left_out.headers(ask.use)
        if form.stream:
            base = identity("chatcmpl") | {"model": model, "object": "chat.completion.chunk"}
            return EventStream(guarded(_stream(answers, base, form), answers, deadline, failed), answers, headers)
        got = await cancel_on_disconnect(request, collected(answers), deadline)
        return JSONResponse(chat_completion(got, model, form), headers=headers)

    return router


def message_of(events: Sequence[Event]) -> dict[str, Any]:
    """Return a whole answer as a message."""
    text = "".join(event.text for event in events if isinstance(event, TextPiece))
    thought = "".join(event.text for event in events if isinstance(event, ReasoningPiece))
    calls = [_call(event) for event in events if isinstance(event, ToolCall)]
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
    if thought:
        message["reasoning_content"] = thought
    return message | ({"tool_calls": calls} if calls else {})


def chat_completion(got: Sequence[Sequence[Event]], model: str, form: ChatForm) -> dict[str, Any]:
    """Return OpenAI's object for all answers to a conversation, each given as its events."""
    ended = [events[-1] for events in got]
    ends = [one for one in ended if isinstance(one, Ended)]
    choices = [
        {
            "index": index,
            "message": message_of(events),
            "logprobs": chat_logprobs(_logprobs(events)) if form.logprobs else None,
            "finish_reason": _reason(end),
        }
        for index, (events, end) in enumerate(zip(got, ends, strict=True))
    ]
    base = identity("chatcmpl") | {"model": model, "object": "chat.completion"}
    return base | {"choices": choices, "usage": usage(ends), "timings": timings(ends[0])}


async def _stream(answers: Sequence[PendingAnswer], base: dict[str, Any], form: ChatForm) -> AsyncIterator[str]:
    def chunk(choices: list[dict[str, Any]], **more: Any) -> str:
        return data(base | {"choices": choices} | ({"usage": None} if form.with_usage else {}) | more)

    calls, ends = [0] * len(answers), dict[int, Ended]()
    for index in range(len(answers)):
        yield chunk([_choice(index, {"role": "assistant", "content": ""})])
    async for index, event in merged(answers):
        if isinstance(event, Ended):
            ends[index] = event
            said = chat_logprobs(event.logprobs) if form.logprobs and event.logprobs else None
            yield chunk([_choice(index, {}, _reason(event), said)], timings=timings(event))
        elif isinstance(event, ToolCall):
            yield chunk([_choice(index, {"tool_calls": [_call(event) | {"index": calls[index]}]})])
            calls[index] += 1
        elif isinstance(event, ReasoningPiece):
            yield chunk([_choice(index, {"reasoning_content": event.text})])
        else:
            said = chat_logprobs(event.logprobs) if form.logprobs else None
            yield chunk([_choice(index, {"content": event.text}, logprobs=said)])
    if form.with_usage:
        yield chunk([], usage=usage([ends[index] for index in sorted(ends)]))
    yield DONE


def _choice(
    index: int, delta: dict[str, Any], reason: str | None = None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _reason(ended: Ended) -> str:
    return "stop" if ended.reason == "cancelled" else ended.reason


def _logprobs(events: Sequence[Event]) -> list[TokenLogprob]:
    return [one for event in events if isinstance(event, (TextPiece, Ended)) for one in event.logprobs]
