"""Request bodies share a limit of memory: what does not fit is refused, and each request releases its part."""

import asyncio
from collections.abc import Sequence
from time import thread_time

from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from master.api.bodies import BodyMemory
from master.api.failures import CLIENT_GONE
from master.api.state import ServeLimits

LIMITS = ServeLimits(body_bytes=100, body_s=5.0, small_body_bytes=0)
ROOM = 150


class Client:
    """A client that sends parts of a body, then leaves."""

    def __init__(self, parts: Sequence[bytes], leaves: bool) -> None:
        self._parts, self._leaves = list(parts), leaves

    async def receive(self) -> Message:
        if not self._parts:
            return {"type": "http.disconnect"}
        part = self._parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(self._parts) or self._leaves}


PARTS = st.lists(st.integers(0, 60).map(lambda size: b"x" * size), min_size=1, max_size=4)


@given(st.lists(st.tuples(PARTS, st.booleans(), st.booleans()), max_size=8))
def test_what_is_taken_is_given_back(bodies: list[tuple[list[bytes], bool, bool]]) -> None:
    async def all_of_them() -> None:
        room, under_way = BodyMemory(ROOM), []
        for parts, leaves, over in bodies:
            held, size, free = room.held(), sum(map(len, parts)), room.free
            failure = await held.read(None, Client(parts, leaves).receive, LIMITS)
            if failure is None:
                assert not leaves
                assert room.free == free - size
                message = await held.replayed(Client([], True).receive)()
                assert (message["body"], message["more_body"]) == (b"".join(parts), False)
            elif failure.status == CLIENT_GONE:
                assert leaves
            else:
                assert 2 * size > {413: 2 * LIMITS.body_bytes, 429: 2 * free - ROOM}[failure.status]
            under_way.append(held)
            if over:
                under_way.pop().release()
        for held in under_way:
            held.release()
        assert room.free == ROOM

    asyncio.run(all_of_them())


def test_the_body_comes_once_and_then_what_the_client_does() -> None:
    async def twice() -> None:
        held, client = BodyMemory(ROOM).held(), Client([b"ab", b"c"], False)
        assert await held.read("3", client.receive, LIMITS) is None
        receive = held.replayed(client.receive)
        assert (await receive())["body"] == b"abc"
        assert (await receive())["type"] == "http.disconnect"

    asyncio.run(twice())


def test_what_a_client_says_of_the_size_is_looked_at_first() -> None:
    async def refused(length: str) -> int:
        failure = await BodyMemory(ROOM).held().read(length, Client([b""], False).receive, LIMITS)
        return failure.status if failure else 0

    assert [asyncio.run(refused(length)) for length in ("101", "-1", "x", "\u00b2", "9" * 5000, "100")] == [413] * 5 + [
        0
    ]


def test_one_client_leaves_room_and_small_bodies_need_none() -> None:
    async def status(room: BodyMemory, client: str, size: int) -> int:
        limits = ServeLimits(body_bytes=100, small_body_bytes=10)
        failure = await room.held().read(None, Client([b"x" * size], False).receive, limits, client)
        return failure.status if failure else 200

    async def all_of_them() -> list[int]:
        room = BodyMemory(ROOM)
        many = [await status(room, "a", 40) for _ in range(9)]
        return [*many, await status(room, "b", 40), await status(room, "a", 10)]

    assert asyncio.run(all_of_them()) == [200, 200, *[429] * 7, 200, 200]


def test_other_clients_go_on_between_two_large_bodies() -> None:
    events: list[str] = []

    async def read(room: BodyMemory) -> None:
        body = b"[" + b"1," * 20_000 + b"1]"
        assert await room.held().read(None, Client([body], False).receive, ServeLimits()) is None
        events.append("read")

    async def others() -> None:
        while events.count("read") < 2:
            events.append("other")
            await asyncio.sleep(0)

    async def together() -> None:
        room = BodyMemory(1 << 20)
        await asyncio.gather(read(room), read(room), others())

    asyncio.run(together())
    first, second = (at for at, event in enumerate(events) if event == "read")
    assert second - first > 1


def test_a_text_without_an_end_is_counted_at_once() -> None:
    begun = thread_time()
    body = b"[" + b"," * 140_000 + b'"' + b'\\"' * 1_000_000
    failure = asyncio.run(BodyMemory(1 << 23).held().read(None, Client([body], False).receive, ServeLimits()))
    assert failure is not None
    assert failure.status == 400
    assert thread_time() - begun < 5  # of processor time; a tenth of a second where it is counted once
