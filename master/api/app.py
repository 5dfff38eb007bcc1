"""The application: routes behind the guard, and errors in the form of the API that was called."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from master.api.anthropic.messages import message_routes
from master.api.failures import ApiFailure, failure_of, public, refusal
from master.api.forms import refuse
from master.api.guard import Access, Guard, form_for
from master.api.openai.chat import chat_routes
from master.api.openai.completions import completion_routes
from master.api.openai.embeddings import embedding_routes, model_routes
from master.api.openai.responses import response_routes
from master.api.page.routes import page_paths, page_routes
from master.api.state import ApiState
from tpi import __version__
from tpi.errors import TpiError

_TEXT = "text/plain; version=0.0.4; charset=utf-8"


class HeadAsGet:
    """ASGI middleware that answers HEAD with the status and headers of GET, without the body (RFC 9110, 9.3.2)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request; the ASGI interface."""
        is_head = scope["type"] == "http" and scope["method"] == "HEAD"

        async def without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        if is_head:
            await self._app({**scope, "method": "GET"}, receive, without_body)
        else:
            await self._app(scope, receive, send)


def make_app(state: ApiState, access: Access, origins: Sequence[str] = ()) -> FastAPI:
    """Return the application with all routes.

    `origins` are sites whose pages may send requests (CORS); none by default.
    """
    app = FastAPI(title="TPI", version=__version__, docs_url=None, redoc_url=None)
    for routes in (chat_routes, completion_routes, response_routes, embedding_routes, model_routes, message_routes):
        app.include_router(routes(state))
    app.include_router(page_routes(state.panel))
    _add_figures(app, state)
    _add_errors(app, state)
    app.add_middleware(HeadAsGet)
    app.add_middleware(Guard, access=access, limits=state.limits, is_open=page_paths().keys().__contains__)
    if origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(origins), allow_methods=["GET", "HEAD", "POST"], allow_headers=["*"]
        )
    return app


def _add_figures(app: FastAPI, state: ApiState) -> None:
    @app.get("/health", summary="Whether the server can answer")
    async def health() -> Response:
        problem = state.service.engine.problem
        if problem is not None:
            return JSONResponse({"status": "error", "reason": public(problem)}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", summary="Metrics for Prometheus")
    async def metrics() -> Response:
        return Response(state.metrics.text, media_type=_TEXT)


def _add_errors(app: FastAPI, state: ApiState) -> None:
    def shown(request: Request, failure: ApiFailure) -> Response:
        headers = {"Retry-After": str(failure.retry_after)} if failure.retry_after is not None else None
        return JSONResponse(form_for(request.url.path, failure), failure.status, headers)

    async def own(request: Request, error: Exception) -> Response:
        assert isinstance(error, TpiError)
        return shown(request, failure_of(error, state.retry_after()))

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return shown(request, failure_of(refuse(error.errors(), error.body)))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        answer = shown(request, refusal(error.status_code, _said(request, error)))
        answer.headers.update(error.headers or {})
        if answer.headers.get("allow") == "GET":
            answer.headers["allow"] = "GET, HEAD"
        return answer

    app.add_exception_handler(TpiError, own)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)


def _said(request: Request, error: HTTPException) -> str:
    known: dict[int, Any] = {
        404: f"there is nothing at {request.url.path[:200]}",
        405: f"this path does not support the method {request.method[:20]}",
    }
    return str(known.get(error.status_code, error.detail))
