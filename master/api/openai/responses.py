"""`POST /v1/responses`: items instead of messages.

The server stores responses for a while, so that a request can continue an earlier response.
"""

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from master.api.answers.events import Event
from master.api.failures import ApiFailure
from master.api.openai.items import Items
from master.api.openai.responses_form import ResponsesForm
from master.api.openai.store import ResponseStore
from master.api.state import ApiState, sender
from master.api.streams import Deadline, EventStream, cancel_on_disconnect, collected, data, guarded, merged


def response_routes(state: ApiState) -> APIRouter:
    """Return the routes of the Responses API, for the application."""
    router, stored = APIRouter(), ResponseStore()

    @router.post("/v1/responses", summary="Answer a conversation (Responses API)")
    async def responses(form: ResponsesForm, request: Request) -> Response:
        model = state.named(form.model)
        owner = sender(request).owner
        kept = stored.of(owner)
        said = [*kept.find(form.previous_response_id), *form.messages(kept.known)]
        ask = form.ask(said, state.client(request, *form.salts()))
        deadline = Deadline(state.limits.answer_s)
        effort = await cancel_on_disconnect(request, state.service.effort(ask), deadline)
        answers = await cancel_on_disconnect(request, state.service.chat(ask), deadline)
        items, headers = Items(form, model, effort), state.left_out.headers(ask.use)

        def keep() -> None:
            if form.store is not False:
                stored.keep(owner, items.id, [*said, items.message()], items.turns())

        if form.stream:
            events = _stream((event async for _, event in merged(answers)), items, keep)
            return EventStream(guarded(events, answers, deadline, partial(_failed, items)), answers, headers)
        (got,) = await cancel_on_disconnect(request, collected(answers), deadline)
        for event in got:
            items.push(event)
        keep()
        return JSONResponse(items.response(), headers=headers)

    return router


async def _stream(events: AsyncIterator[Event], items: Items, keep: Any) -> AsyncIterator[str]:
    for said in items.first_events():
        yield _sent(said)
    async for event in events:
        for said in items.push(event):
            yield _sent(said)
    keep()
    yield _sent(items.completed())


def _sent(event: dict[str, Any]) -> str:
    return data(event, str(event["type"]))


def _failed(items: Items, failure: ApiFailure) -> list[str]:
    return [_sent(items.failed(failure.code or failure.kind, failure.message))]
