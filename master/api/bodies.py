"""Reading of request bodies, within limits of size and time, and of memory for all bodies together."""

import asyncio
from collections import Counter

from starlette.types import Message, Receive

from master.api.failures import CLIENT_GONE, RETRY_S, ApiFailure, refusal
from master.api.forms import MOST_VALUES, has_more_values, may_have_more_values
from master.api.state import ServeLimits

_DIGITS = 20  # digits of a Content-Length
_FIELDS = 4096  # values in addition to those of the longest list
_LARGE = 1 << 14  # values, which take about 30 ms to parse
_PAUSE_S = 0.3  # pause before each large body, because parsing one holds up all other clients


class BodyMemory:
    """The memory limit of all larger request bodies together, in bytes.

    A client never holds more than is still free, so that many large bodies of one client leave memory for others.
    """

    def __init__(self, most: int) -> None:
        self.free = most
        self.parsing = asyncio.Lock()
        self._held = Counter[str]()

    def take(self, client: str, size: int) -> bool:
        """Take `size` bytes for a client; return False if it would then hold more than is still free."""
        if self._held[client] + 2 * size > self.free:
            return False
        self.free -= size
        self._held[client] += size
        return True

    def give_back(self, client: str, size: int) -> None:
        """Give back `size` bytes of a client."""
        self.free += size
        self._held -= Counter({client: size})

    def held(self) -> "HeldBody":
        """Return an empty HeldBody for a new request; call its `release` at the end of the request."""
        return HeldBody(self)


class HeldBody:
    """The body of one request, and the memory that it holds."""

    def __init__(self, room: BodyMemory) -> None:
        self._room, self._client = room, ""
        self._size = self._taken = 0  # bytes in total, and those that count against the limit
        self._parts: list[bytes] = []

    async def read(
        self, length: str | None, receive: Receive, limits: ServeLimits, client: str = ""
    ) -> ApiFailure | None:
        """Read the body; return the failure if it is refused. `length` is the Content-Length that the client sent."""
        self._client = client
        most = limits.body_bytes
        too_large = refusal(
            413, f"the body is over the limit of {most} bytes; send a smaller request", code="body_too_large"
        )
        if length is not None and (len(length) > _DIGITS or not length.isdecimal() or int(length) > most):
            return too_large
        try:
            failure = await asyncio.wait_for(self._read(receive, limits, too_large), limits.body_s)
        except asyncio.TimeoutError:
            return refusal(408, f"the body did not arrive completely within {limits.body_s:.0f} s", code="timeout")
        return failure or await self._counted()

    async def _counted(self) -> ApiFailure | None:
        """Return the failure if the body has too many JSON values, else None.

        Before a large body is parsed, pause so that requests of other clients can run.
        """
        text = b"".join(self._parts).decode("latin-1")
        if not may_have_more_values(text, _LARGE):
            return None
        async with self._room.parsing:
            await asyncio.sleep(_PAUSE_S)
        if has_more_values(text, MOST_VALUES + _FIELDS):
            return refusal(
                400, f"the body has more than {MOST_VALUES} values; send a smaller request", code="invalid_value"
            )
        return None

    def replayed(self, receive: Receive) -> Receive:
        """Return an ASGI `receive` that yields the body as one message, frees it, and then forwards to `receive`."""
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
        """Give the memory back; call this at the end of the request."""
        self._room.give_back(self._client, self._taken)
        self._size = self._taken = 0
        self._parts.clear()

    async def _read(self, receive: Receive, limits: ServeLimits, too_large: ApiFailure) -> ApiFailure | None:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":  # the parts so far may look complete, but are not
                return refusal(CLIENT_GONE, "the client disconnected before the end of the body", code="client_gone")
            part = message.get("body", b"")
            if self._size + len(part) > limits.body_bytes:
                return too_large
            self._size += len(part)
            needed = max(0, self._size - limits.small_body_bytes) - self._taken
            if not self._room.take(self._client, needed):
                return busy("too many large requests are being read; try again later")
            self._taken += needed
            self._parts.append(part)
            if not message.get("more_body"):
                return None


def busy(said: str) -> ApiFailure:
    """Return the failure (HTTP 429) with the message `said`, for a request that arrives while the server is full."""
    return ApiFailure(429, "rate_limit_error", said, code="busy", retry_after=RETRY_S)
