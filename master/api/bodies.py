"""Bodies of requests as they come in: within limits of size and time, and of memory for all of them together."""

import asyncio

from starlette.types import Message, Receive

from master.api.failures import CLIENT_GONE, RETRY_S, ApiFailure, refusal
from master.api.forms import MOST_VALUES, has_more_values
from master.api.state import ServeLimits

_DIGITS = 20  # of a length
_FIELDS = 4096  # values beside those of the longest list


class BodyRoom:
    """What all bodies may take together, bytes: a crowd of large ones does not fill this machine's memory."""

    def __init__(self, most: int) -> None:
        self.free = most

    def held(self) -> "HeldBody":
        """For one request, until its `release`."""
        return HeldBody(self)


class HeldBody:
    """One request's part of a room."""

    def __init__(self, room: BodyRoom) -> None:
        self._room, self._size = room, 0
        self._parts: list[bytes] = []

    async def read(self, length: str | None, receive: Receive, limits: ServeLimits) -> ApiFailure | None:
        """Take it in; what is wrong with it. `length` is what the client says of its size."""
        most = limits.body_bytes
        too_large = refusal(413, f"the body is over the limit of {most} bytes; ask for less", code="body_too_large")
        if length is not None and (len(length) > _DIGITS or not length.isdecimal() or int(length) > most):
            return too_large
        try:
            failure = await asyncio.wait_for(self._read(receive, most, too_large), limits.body_s)
        except asyncio.TimeoutError:
            return refusal(408, f"the body did not come within {limits.body_s:.0f} s", code="timeout")
        if failure is None and has_more_values(b"".join(self._parts).decode("latin-1"), MOST_VALUES + _FIELDS):
            return refusal(400, f"the body has more than {MOST_VALUES} values; ask for less", code="invalid_value")
        return failure

    def replayed(self, receive: Receive) -> Receive:
        """The body at once, kept here no longer; then whatever comes: that the client left."""
        body: bytes | None = b"".join(self._parts)
        self._parts.clear()

        async def replay() -> Message:
            nonlocal body
            if body is None:
                return await receive()
            message = {"type": "http.request", "body": body, "more_body": False}
            body = None
            return message

        return replay

    def release(self) -> None:
        """The request is over."""
        self._room.free += self._size
        self._size = 0
        self._parts.clear()

    async def _read(self, receive: Receive, most: int, too_large: ApiFailure) -> ApiFailure | None:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":  # what came may look whole, and is not
                return refusal(CLIENT_GONE, "the client left before the end of the body", code="client_gone")
            part = message.get("body", b"")
            if self._size + len(part) > most:
                return too_large
            if len(part) > self._room.free:
                return _full()
            self._room.free -= len(part)
            self._size += len(part)
            self._parts.append(part)
            if not message.get("more_body"):
                return None


def _full() -> ApiFailure:
    said = "too many large bodies are under way; ask again in a while"
    return ApiFailure(429, "rate_limit_error", said, code="busy", retry_after=RETRY_S)
