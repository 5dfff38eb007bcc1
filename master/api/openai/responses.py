"""`POST /v1/responses`: items instead of messages, kept for a while to be gone on from."""

from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from master.api.answers.events import Event
from master.api.failures import ApiFailure, RequestError
from master.api.openai.items import Items
from master.api.openai.responses_form import ResponsesForm
from master.api.state import ApiState
from master.api.streams import Deadline, EventStream, collected, data, guarded, merged, unless_gone
from master.text.tokenizer import Message

_KEPT = 256  # responses


@dataclass
class KeptTurns:
    """What was said up to each of the last responses, by their ids; and each item of these responses, by its id."""

    known: dict[str, Message] = field(default_factory=dict)
    _turns: OrderedDict[str, tuple[Message, ...]] = field(default_factory=OrderedDict)
    _items: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def find(self, name: str | None) -> tuple[Message, ...]:
        """The turns before; raises RequestError if they are not known (any more)."""
        if name is None:
            return ()
        if name not in self._turns:
            said = f"there is no response {name[:100]!r} any more; send what was said as input"
            raise RequestError(said, "previous_response_id", "previous_response_not_found", 404)
        return self._turns[name]

    def keep(self, name: str, messages: Sequence[Message], items: Mapping[str, Message]) -> None:
        """Remember a response and its items."""
        self._turns[name], self._items[name] = tuple(messages), tuple(items)
        self.known.update(items)
        while len(self._turns) > _KEPT:
            oldest, _ = self._turns.popitem(last=False)
            for item in self._items.pop(oldest):
                self.known.pop(item, None)


def response_routes(state: ApiState) -> APIRouter:
    """The route, for an application."""
    router, kept = APIRouter(), KeptTurns()

    @router.post("/v1/responses", summary="Answer items")
    async def responses(form: ResponsesForm, request: Request) -> Response:
        model = state.named(form.model)
        said = [*kept.find(form.previous_response_id), *form.messages(kept.known)]
        ask = form.ask(said, state.client(request))
        deadline = Deadline(state.limits.answer_s)
        answers = await unless_gone(request, state.service.chat(ask), deadline)
        items, headers = Items(form, model), state.left_out.headers(ask.use)

        def keep() -> None:
            if form.store is not False:
                kept.keep(items.id, [*said, items.message()], items.turns())

        if form.stream:
            events = _stream((event async for _, event in merged(answers)), items, keep)
            return EventStream(guarded(events, answers, deadline, partial(_failed, items)), answers, headers)
        (got,) = await unless_gone(request, collected(answers), deadline)
        for event in got:
            items.push(event)
        keep()
        return JSONResponse(items.response(), headers=headers)

    return router


async def _stream(events: AsyncIterator[Event], items: Items, keep: Any) -> AsyncIterator[str]:
    for said in items.begun():
        yield _sent(said)
    async for event in events:
        for said in items.push(event):
            yield _sent(said)
    keep()
    yield _sent(items.completed())


def _sent(event: dict[str, Any]) -> str:
    return data(event, str(event["type"]))


def _failed(items: Items, failure: ApiFailure) -> list[str]:
    """How a stream ends that has begun well."""
    return [_sent(items.failed(failure.code or failure.kind, failure.message))]
