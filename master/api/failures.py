"""Errors of requests, and their form for clients."""

import logging
from dataclasses import dataclass

from tpi.errors import BusyError, NodeError, TpiError, UsageError


class RequestError(UsageError):
    """The error of a request that cannot be answered. `field` is the field at fault, `code` a machine-readable word."""

    def __init__(self, message: str, field: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.field = field
        self.code = code
        self.status = status


_log = logging.getLogger("tpi.serve")


@dataclass(frozen=True)
class ApiFailure:
    """An error as the client gets it: HTTP status, type, message, the field at fault, and a code for programs."""

    status: int
    kind: str
    message: str
    field: str | None = None
    code: str | None = None
    retry_after: int | None = None  # seconds


_KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "timeout_error", 413: "request_too_large", 415: "invalid_request_error",
    422: "invalid_request_error", 429: "rate_limit_error", 500: "api_error", 503: "overloaded_error",
}  # fmt: skip

RETRY_S = 5  # if no better estimate is known
CLIENT_GONE = 499  # nginx's status; it appears only in the log


def failure_of(error: TpiError, retry_after: int = RETRY_S) -> ApiFailure:
    """Return the failure that a client gets for `error`.

    A message that is not about the request may name paths and flags of this machine, so it goes only to the
    log.
    """
    if isinstance(error, RequestError):
        return refusal(error.status, str(error), error.field, error.code)
    if isinstance(error, BusyError):
        return ApiFailure(429, _KINDS[429], str(error), code="busy", retry_after=retry_after)
    _log.warning("the client was told %r: %s", public(error), error)
    if isinstance(error, UsageError):
        return refusal(400, public(error))
    code = "node_lost" if isinstance(error, NodeError) else "unavailable"
    return ApiFailure(503, _KINDS[503], public(error), code=code, retry_after=retry_after)


def public(error: TpiError) -> str:
    """Return a message for clients about `error`, without paths of this machine or flags of commands."""
    if isinstance(error, (RequestError, BusyError)):
        return str(error)
    if isinstance(error, NodeError):
        return f"the node {error.node} failed or was lost; try again later"
    if isinstance(error, UsageError):
        return "the model cannot answer this request; the server's log says why"
    return "the server cannot answer now; its log says why"


def refusal(status: int, message: str, field: str | None = None, code: str | None = None) -> ApiFailure:
    """Return the failure for a request that is itself at fault."""
    return ApiFailure(status, _KINDS.get(status, "invalid_request_error"), message, field, code)


def openai_form(failure: ApiFailure) -> dict[str, object]:
    """Return the error as described in OpenAI's API reference, "Error codes"."""
    error = {"message": failure.message, "type": failure.kind, "param": failure.field, "code": failure.code}
    return {"error": error}


def anthropic_form(failure: ApiFailure) -> dict[str, object]:
    """Return the error as described in Anthropic's API reference, "Errors"."""
    named = failure.field is None or failure.message.startswith(failure.field)
    said = failure.message if named else f"{failure.field}: {failure.message}"
    return {"type": "error", "error": {"type": failure.kind, "message": said}}
