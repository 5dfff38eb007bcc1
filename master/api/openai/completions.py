"""`POST /v1/completions`: continue a text without a chat template, as in OpenAI's API reference."""

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from master.api.answers.answering import PendingAnswer
from master.api.answers.events import Ended, Event, TextPiece, TokenLogprob
from master.api.answers.requests import GenerationOptions, TextRequest
from master.api.failures import RequestError
from master.api.openai.common import DONE, failed, identity, text_logprobs, timings, usage
from master.api.openai.fields import CommonFields, ResponseFormat, TokenLimit, grammar_of, limit_of
from master.api.state import ApiState
from master.api.streams import Deadline, EventStream, cancel_on_disconnect, collected, data, guarded, merged
from master.api.unused import NEUTRAL
from master.generation.client import Client

_MOST_PROMPTS = 16
_TOKENS = 16  # default of `max_tokens`, as in OpenAI's reference

Ids = Annotated[list[int], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, max_length=_MOST_PROMPTS, fail_fast=True)]


class CompletionForm(CommonFields):
    """The body of `/v1/completions`, as in OpenAI's API reference, "Create completion"."""

    neutral = {**NEUTRAL, "add_special_tokens": (True,)}  # noqa: RUF012

    prompt: str | Ids | Texts | Annotated[list[Ids], Field(min_length=1, max_length=_MOST_PROMPTS, fail_fast=True)]
    max_tokens: TokenLimit | None = _TOKENS
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool | None = None
    response_format: ResponseFormat | None = None

    def asks(self, client: Client) -> list[TextRequest]:
        """Return a request for each prompt; raise a RequestError if a field is invalid."""
        if self.echo and self.logprobs is not None:
            raise RequestError(
                "echo cannot be combined with logprobs, because prompts have none; remove one of them", "echo"
            )
        grammar, field = grammar_of(self.response_format)
        wanted = GenerationOptions(
            self.sampling(), limit_of(self.max_tokens), self.stops(), self.logprobs, self.n or 1, bool(self.ignore_eos),
            grammar, field,
        )  # fmt: skip
        return [TextRequest(prompt, wanted, client, echo=bool(self.echo)) for prompt in prompts_of(self.prompt)]


def prompts_of(given: str | Sequence[int] | Sequence[str] | Sequence[list[int]]) -> list[str | tuple[int, ...]]:
    """Return the prompts as a list: each is a text or a list of token ids."""
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], int):
        return [tuple(one for one in given if isinstance(one, int))]
    return [one if isinstance(one, str) else tuple(one) for one in given if not isinstance(one, int)]


def completion_routes(state: ApiState) -> APIRouter:
    """Return the routes of completions, for the application."""
    router = APIRouter()

    @router.post("/v1/completions", summary="Continue a text")
    async def completions(form: CompletionForm, request: Request) -> Response:
        model = state.named(form.model)
        asks = form.asks(state.client(request, *form.salts()))
        deadline = Deadline(state.limits.answer_s)
        answers = await cancel_on_disconnect(request, _begun(state, asks), deadline)
        if form.stream:
            events = _stream(answers, _base(model), form)
            return EventStream(guarded(events, answers, deadline, failed), answers)
        got = await cancel_on_disconnect(request, collected(answers), deadline)
        return JSONResponse(text_completion(got, [answer.echo for answer in answers], model, form))

    return router


async def _begun(state: ApiState, asks: Sequence[TextRequest]) -> list[PendingAnswer]:
    """Start the answers to all prompts; return them in order. If one cannot start, cancel the others."""
    answers: list[PendingAnswer] = []
    try:
        for ask in asks:
            answers += await state.service.text(ask)
    except BaseException:  # the caller would not know of the answers that have begun
        for answer in answers:
            answer.cancel()
        raise
    return answers


def text_completion(
    got: Sequence[Sequence[Event]], echoes: Sequence[str], model: str, form: CompletionForm
) -> dict[str, Any]:
    """Return OpenAI's object for all answers to all prompts, each given as its events and the text it begins with."""
    choices, ends = [], []
    for index, (events, echo) in enumerate(zip(got, echoes, strict=True)):
        text = echo + "".join(event.text for event in events if isinstance(event, TextPiece))
        tokens = [one for event in events if isinstance(event, (TextPiece, Ended)) for one in event.logprobs]
        end = events[-1]
        assert isinstance(end, Ended)
        ends.append(end)
        choices.append(_choice(index, text, end.reason, tokens if form.logprobs is not None else None))
    return _base(model) | {"choices": choices, "usage": _usage(ends, form.n or 1), "timings": timings(ends[0])}


def _base(model: str) -> dict[str, Any]:
    return identity("cmpl") | {"object": "text_completion", "model": model}


async def _stream(answers: Sequence[PendingAnswer], base: dict[str, Any], form: CompletionForm) -> AsyncIterator[str]:
    ends: dict[int, Ended] = {}
    for index, answer in enumerate(answers):
        if answer.echo:
            yield data(base | {"choices": [_choice(index, answer.echo, None, None)]})
    async for index, event in merged(answers):
        if isinstance(event, TextPiece):
            tokens = event.logprobs if form.logprobs is not None else None
            yield data(base | {"choices": [_choice(index, event.text, None, tokens)]})
        elif isinstance(event, Ended):
            ends[index] = event
            tokens = event.logprobs if form.logprobs is not None and event.logprobs else None
            last = _choice(index, "", event.reason, tokens)
            yield data(base | {"choices": [last], "timings": timings(event)})
    if form.with_usage:
        yield data(base | {"choices": [], "usage": _usage([ends[index] for index in sorted(ends)], form.n or 1)})
    yield DONE


def _usage(ends: Sequence[Ended], count: int) -> dict[str, Any]:
    total = usage(ends[:count])
    for first in range(count, len(ends), count):
        more = usage(ends[first : first + count])
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            total[name] += more[name]
        total["prompt_tokens_details"]["cached_tokens"] += more["prompt_tokens_details"]["cached_tokens"]
    return total


def _choice(index: int, text: str, reason: str | None, tokens: Sequence[TokenLogprob] | None) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": None if tokens is None else text_logprobs(tokens),
        "finish_reason": "stop" if reason == "cancelled" else reason,
    }
