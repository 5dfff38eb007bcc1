"""Sending of answers, as server-sent events or whole, to clients that may disconnect or read slowly."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from master.api.answers.answering import PendingAnswer
from master.api.answers.events import Event
from master.api.failures import CLIENT_GONE, ApiFailure, RequestError, failure_of
from tpi.errors import TpiError

T = TypeVar("T")

_SLOW_S = 30.0  # seconds after which a client that reads nothing is disconnected
_PULSE_S = 10.0  # seconds without an event, after which a comment tells proxies that the stream is alive
_AGAIN_S = 0.1
_AHEAD = 16  # limit of events in the queue that merges several answers; further events stay in their `Backlog`
PULSE = ": alive\n\n"


class Deadline:
    """The deadline of one request, for its preparation and its answer together."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s, self._loop = limit_s, asyncio.get_running_loop()
        self._ends = self._loop.time() + limit_s

    @property
    def left(self) -> float:
        """Seconds until the deadline, 0 after it."""
        return max(0.0, self._ends - self._loop.time())

    def missed(self) -> RequestError:
        """Return the error that says that the deadline was missed."""
        return RequestError(f"the answer took longer than {self._limit_s:.0f} s", code="timeout", status=408)


class EventStream(Response):
    """Server-sent events. If the client disconnects, or reads nothing for too long, the answers are cancelled."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[str], answers: Sequence[PendingAnswer], headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events, self._answers = events, answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; the ASGI interface."""
        sending, gone = asyncio.ensure_future(self._send(send)), asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait([sending, gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for answer in self._answers:
                answer.cancel()
            await _end(sending, gone)
        if not sending.cancelled():
            sending.result()  # re-raise an unexpected error: the server logs it and closes the connection

    async def _send(self, send: Send) -> None:
        with suppress(asyncio.TimeoutError):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self._events:
                body = {"type": "http.response.body", "body": event.encode(), "more_body": True}
                await asyncio.wait_for(send(body), _SLOW_S)
            await asyncio.wait_for(send({"type": "http.response.body", "body": b""}), _SLOW_S)


async def _end(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel tasks again and again until all have ended, because `wait_for` can lose a cancellation.

    It loses one that comes at the moment when its awaitable ends.
    """
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)


async def guarded(
    events: AsyncIterator[str],
    answers: Sequence[PendingAnswer],
    deadline: Deadline,
    failed: Callable[[ApiFailure], Sequence[str]],
) -> AsyncIterator[str]:
    """Yield `events`, with a comment after each 10 s without event. An error or missed deadline is the last event."""
    source = aiter(events)
    following: asyncio.Task[str] | None = None
    try:
        while deadline.left:
            following = following or asyncio.ensure_future(_next(source))
            done, _ = await asyncio.wait([following], timeout=min(_PULSE_S, deadline.left))
            if not done:
                yield PULSE
                continue
            event = following.result()
            following = None
            yield event
        raise deadline.missed()
    except StopAsyncIteration:
        return
    except TpiError as error:
        for event in failed(failure_of(error)):
            yield event
    finally:
        if following is not None:
            following.cancel()
        for answer in answers:
            answer.cancel()


async def merged(answers: Sequence[PendingAnswer]) -> AsyncIterator[tuple[int, Event]]:
    """Yield the events of several answers in order of arrival, each with the answer's index."""
    if len(answers) == 1:
        async for event in answers[0]:
            yield 0, event
        return
    queue: asyncio.Queue[tuple[int, Event] | TpiError | None] = asyncio.Queue(_AHEAD)

    async def pump(number: int, answer: PendingAnswer) -> None:
        try:
            async for event in answer:
                await queue.put((number, event))
            await queue.put(None)
        except TpiError as error:
            await queue.put(error)

    tasks = [asyncio.ensure_future(pump(number, answer)) for number, answer in enumerate(answers)]
    try:
        left = len(tasks)
        while left:
            got = await queue.get()
            if isinstance(got, TpiError):
                raise got
            if got is None:
                left -= 1
            else:
                yield got
    finally:
        for task in tasks:
            task.cancel()


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T], deadline: Deadline) -> T:
    """Return the result of `work`, unless the client disconnects or the deadline passes first.

    Raises:
        RequestError: if the work was cancelled.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request.receive))
    try:
        done, _ = await asyncio.wait([task, gone], timeout=deadline.left, return_when=asyncio.FIRST_COMPLETED)
        if task in done:
            return task.result()
        if gone in done:
            raise RequestError("the client disconnected", code="client_gone", status=CLIENT_GONE)
        raise deadline.missed()
    finally:
        await _end(task, gone)


async def collected(answers: Sequence[PendingAnswer]) -> list[list[Event]]:
    """Return all events of each answer. Cancel all answers if one fails or this coroutine is cancelled."""
    try:
        return list(await asyncio.gather(*(_all(answer) for answer in answers)))
    finally:
        for answer in answers:
            answer.cancel()


def data(value: object, event: str | None = None) -> str:
    """Format a value as one server-sent event with JSON."""
    named = f"event: {event}\n" if event else ""
    return f"{named}data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def _all(answer: PendingAnswer) -> list[Event]:
    return [event async for event in answer]


async def _next(source: AsyncIterator[str]) -> str:
    return await anext(source)


async def _gone(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
