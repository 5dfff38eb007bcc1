"""Bodies of requests as they come in: within limits of size and time, and of memory for all of them together."""

import asyncio
from collections import Counter

from starlette.types import Message, Receive

from master.api.failures import CLIENT_GONE, RETRY_S, ApiFailure, refusal
from master.api.forms import MOST_VALUES, has_more_values, may_have_more_values
from master.api.state import ServeLimits

_DIGITS = 20  # of a length
_FIELDS = 4096  # values beside those of the longest list
_LARGE = 1 << 14  # values, which take some 30 ms to parse
_PAUSE_S = 0.3  # before each large body: parsing holds up all other clients


class BodyRoom:
    """Bytes that all larger bodies may take together: a crowd of them does not fill this machine's memory.

    No client takes more than is left to the others, so that one that sends many large bodies leaves them room.
    """

    def __init__(self, most: int) -> None:
        self.free = most
        self.parsing = asyncio.Lock()
        self._held = Counter[str]()

    def take(self, client: str, size: int) -> bool:
        """Take bytes for a client; return False if it would have more than is left."""
        if self._held[client] + 2 * size > self.free:
            return False
        self.free -= size
        self._held[client] += size
        return True

    def give_back(self, client: str, size: int) -> None:
        """Give bytes of a client back."""
        self.free += size
        self._held -= Counter({client: size})

    def held(self) -> "HeldBody":
        """For one request, until its `release`."""
        return HeldBody(self)


class HeldBody:
    """One request's part of a room."""

    def __init__(self, room: BodyRoom) -> None:
        self._room, self._client = room, ""
        self._size = self._taken = 0  # bytes, and those of them that take room
        self._parts: list[bytes] = []

    async def read(
        self, length: str | None, receive: Receive, limits: ServeLimits, client: str = ""
    ) -> ApiFailure | None:
        """Take it in; return what is wrong with it. `length` is what the `client` says of its size."""
        self._client = client
        most = limits.body_bytes
        too_large = refusal(413, f"the body is over the limit of {most} bytes; ask for less", code="body_too_large")
        if length is not None and (len(length) > _DIGITS or not length.isdecimal() or int(length) > most):
            return too_large
        try:
            failure = await asyncio.wait_for(self._read(receive, limits, too_large), limits.body_s)
        except asyncio.TimeoutError:
            return refusal(408, f"the body did not come within {limits.body_s:.0f} s", code="timeout")
        return failure or await self._counted()

    async def _counted(self) -> ApiFailure | None:
        """Refuse a body of too many values. Let other clients go on before a large one, which is parsed after this."""
        text = b"".join(self._parts).decode("latin-1")
        if not may_have_more_values(text, _LARGE):
            return None
        async with self._room.parsing:
            await asyncio.sleep(_PAUSE_S)
        if has_more_values(text, MOST_VALUES + _FIELDS):
            return refusal(400, f"the body has more than {MOST_VALUES} values; ask for less", code="invalid_value")
        return None

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
        self._room.give_back(self._client, self._taken)
        self._size = self._taken = 0
        self._parts.clear()

    async def _read(self, receive: Receive, limits: ServeLimits, too_large: ApiFailure) -> ApiFailure | None:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":  # what came may look whole, and is not
                return refusal(CLIENT_GONE, "the client left before the end of the body", code="client_gone")
            part = message.get("body", b"")
            if self._size + len(part) > limits.body_bytes:
                return too_large
            self._size += len(part)
            needed = max(0, self._size - limits.small_body_bytes) - self._taken
            if not self._room.take(self._client, needed):
                return busy("too many large bodies are under way; ask again in a while")
            self._taken += needed
            self._parts.append(part)
            if not message.get("more_body"):
                return None


def busy(said: str) -> ApiFailure:
    """Return the failure of a request that finds no room."""
    return ApiFailure(429, "rate_limit_error", said, code="busy", retry_after=RETRY_S)
