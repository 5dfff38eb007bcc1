"""Checks of every request before it is parsed: key, host name, content type, and the body's size and time."""

import hmac
import json
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from secrets import token_hex
from time import perf_counter

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from master.api.bodies import BodyMemory, HeldBody, busy
from master.api.failures import ApiFailure, anthropic_form, openai_form, refusal
from master.api.senders import sender_of
from master.api.state import ServeLimits
from tpi.text import plain

OPEN_PATHS = frozenset({"/health"})
_NAMES = ("localhost",)
_HOST = re.compile(
    r"(?:\[(?P<six>[0-9a-f:.]+)\]|(?P<name>[^\s:%\[\]@/]+))(?::[0-9]{1,5})?"
)  # a Host header as in RFC 3986, without zones and user names

log = logging.getLogger("tpi.serve")


@dataclass(frozen=True)
class Access:
    """The access rules: the valid API keys (empty: no key is required), and the host names accepted besides localhost.

    `share_prefixes`: all clients share cached prefixes.
    """

    keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    share_prefixes: bool = False


class Guard:
    """ASGI middleware that checks key, Host, Content-Type and body, and gives each request a number for the log."""

    def __init__(self, app: ASGIApp, access: Access, limits: ServeLimits, is_open: Callable[[str], bool]) -> None:
        """Create the middleware. `is_open(path)` returns True for a path that needs no key."""
        self._app, self._access, self._limits, self._open = app, access, limits, is_open
        self._room = BodyMemory(limits.bodies_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request and pass it on, or refuse it; the ASGI interface."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request, body = _Logged(scope, send), self._room.held()
        try:
            failure = await self._checked(scope, receive, body)
            if failure is not None:
                await request.refuse(failure)
            else:
                await self._app(scope, body.replayed(receive) if _has_body(scope) else receive, request.send)
        finally:
            body.release()
            request.finish()

    async def _checked(self, scope: Scope, receive: Receive, body: HeldBody) -> ApiFailure | None:
        if scope["state"].get("crowded"):
            return busy("too many connections are open; try again later")
        headers = Headers(scope=scope)
        key, address = self._key_of(headers), (scope.get("client") or ("",))[0]
        sender = sender_of(address, key, self._access.keys, self._access.share_prefixes)
        scope["state"]["sender"] = sender
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._known_host(hosts[0]):
            said = (
                "unknown Host; this server answers to its addresses and localhost, and to names given with --allow-host"
            )
            return refusal(403, said, code="unknown_host")
        if scope["path"] not in OPEN_PATHS and not self._open(scope["path"]) and not self._knows(key):
            said = "an API key is required, as `Authorization: Bearer KEY` or `x-api-key: KEY`"
            if key:
                said = "the API key is wrong; use one that the server was started with"
            return refusal(401, said, code="invalid_api_key")
        if not _has_body(scope):
            return None
        if headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            return refusal(415, "the Content-Type must be application/json", code="unsupported_media_type")
        return await body.read(headers.get("content-length"), receive, self._limits, sender.name)

    def _known_host(self, host: str) -> bool:
        """Return True for an IP address, localhost and the allowed names, each with or without a port.

        This refuses pages of other sites whose name resolves to this machine (DNS rebinding). An address with a zone
        (`fe80::1%name`) is refused, because ip_address accepts any text as a zone.
        """
        parts = _HOST.fullmatch(host.lower())
        if parts is None:
            return False
        with suppress(ValueError):
            if parts["six"] is not None:
                IPv6Address(parts["six"])
            else:
                IPv4Address(parts["name"])
            return True
        return parts["name"] is not None and (parts["name"] in _NAMES or parts["name"] in self._access.hosts)

    def _key_of(self, headers: Headers) -> str:
        """Return the API key in a request's headers, or "". If both headers have a key, prefer the valid one."""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        both = (bearer.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "").strip())
        given = [one for one in both if one] or [""]
        return next((one for one in given if self._knows(one)), given[0])

    def _knows(self, key: str) -> bool:
        known = [
            hmac.compare_digest(key.encode(), one.encode()) for one in self._access.keys
        ]  # compare with every key, so that the time does not depend on which one matches
        return any(known) or not known


class _Logged:
    """One request with its number, which a response header contains and each of its log lines begins with."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self._id = token_hex(6)
        scope.setdefault("state", {})["request_id"] = self._id
        self._begun, self._status = perf_counter(), 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self._id.encode()), *_SAFE]
        await self._send(message)

    async def refuse(self, failure: ApiFailure) -> None:
        body = json.dumps(form_for(self._scope["path"], failure)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if failure.status in (408, 413, 429):
            headers.append((b"connection", b"close"))  # the rest of the body is not read
        if failure.retry_after is not None:
            headers.append((b"retry-after", str(failure.retry_after).encode()))
        await self.send({"type": "http.response.start", "status": failure.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    def finish(self) -> None:
        client = (self._scope.get("client") or ("-",))[0]
        seconds = perf_counter() - self._begun
        line = "%s %s %s %s %d %.3f s"
        log.info(line, self._id, client, self._scope["method"], plain(self._scope["path"]), self._status, seconds)


_SAFE = ((b"x-content-type-options", b"nosniff"),)


def _has_body(scope: Scope) -> bool:
    return scope["method"] in ("POST", "PUT", "PATCH")


def form_for(path: str, failure: ApiFailure) -> dict[str, object]:
    """Return an error in the form of the API that `path` belongs to."""
    return anthropic_form(failure) if path.startswith("/v1/messages") else openai_form(failure)
