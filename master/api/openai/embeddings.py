"""`POST /v1/embeddings`, the mean of the last hidden states scaled to length 1; and `GET /v1/models`."""

import base64
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from master.api.answers.requests import GenerationOptions, TextRequest
from master.api.failures import RequestError
from master.api.forms import Body
from master.api.openai.completions import Ids, prompts_of
from master.api.state import ApiState
from master.api.streams import Deadline, cancel_on_disconnect
from master.api.unused import CALLER

_MOST_INPUTS = 2048  # OpenAI's limit

Inputs = Annotated[list[str], Field(min_length=1, max_length=_MOST_INPUTS, fail_fast=True)]


class EmbeddingForm(Body):
    """The body of `/v1/embeddings`, as in OpenAI's API reference, "Create embeddings"."""

    harmless = CALLER
    neutral = {"add_special_tokens": (True,), "normalize": (True,), "priority": (0,)}  # noqa: RUF012

    input: str | Ids | Inputs | Annotated[list[Ids], Field(min_length=1, max_length=_MOST_INPUTS, fail_fast=True)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)


def embedding_routes(state: ApiState) -> APIRouter:
    """Return the route of `/v1/embeddings`, for the application."""
    router = APIRouter()

    @router.post("/v1/embeddings", summary="Embed a text as a vector")
    async def embeddings(form: EmbeddingForm, request: Request) -> Response:
        model = state.named(form.model)
        if form.dimensions is not None:
            raise RequestError(
                "this model's vectors cannot be shortened; leave dimensions out", "dimensions", "invalid_value"
            )
        return JSONResponse(
            await cancel_on_disconnect(request, _all(state, form, model, request), Deadline(state.limits.answer_s))
        )

    return router


def model_routes(state: ApiState) -> APIRouter:
    """Return the routes for the list of models (the one model under each of its names), and for one name."""
    router = APIRouter()

    def card(name: str) -> dict[str, Any]:
        known = {"created": state.created, "owned_by": "tpi", "max_model_len": state.service.context}
        return {"id": name, "object": "model", **known}

    @router.get("/v1/models", summary="List the models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [card(name) for name in state.models]})

    @router.get("/v1/models/{name:path}", summary="Describe one model")
    async def model(name: str) -> Response:
        return JSONResponse(card(state.named(name)))

    return router


async def _all(state: ApiState, form: EmbeddingForm, model: str, request: Request) -> dict[str, Any]:
    """Return the embeddings of all inputs, computed one after the other so that they do not delay other clients."""
    found, tokens = [], 0
    for index, prompt in enumerate(prompts_of(form.input)):
        vector, count = await state.service.embed(
            TextRequest(prompt, GenerationOptions(), state.client(request), "input", literal=True)
        )
        raw = vector.astype("<f4")
        shown = (
            base64.b64encode(raw.tobytes()).decode() if form.encoding_format == "base64" else np.asarray(raw).tolist()
        )
        found.append({"object": "embedding", "index": index, "embedding": shown})
        tokens += count
    used = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": found, "model": model, "usage": used}
