"""Server-sent events whose client leaves: the answers are cancelled, at whatever moment that is."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from master.api.streams import EventStream


class Given:
    """An answer that records whether it was cancelled."""

    def __init__(self) -> None:
        self.up = False

    def cancel(self) -> None:
        self.up = True


@pytest.mark.parametrize("turns", range(6))
def test_a_client_that_leaves_during_an_event_is_noticed(turns: int) -> None:
    """In Python 3.11, a task cancelled as it ends may never get the error; `turns` of the loop lie between the two."""
    answer: Any = Given()

    async def events() -> AsyncIterator[str]:
        yield "first"
        await asyncio.Event().wait()  # the next would take for ever

    async def leave() -> None:
        taken = asyncio.Event()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await taken.wait()

        async def receive() -> dict[str, str]:
            await taken.wait()
            for _ in range(turns):
                await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        answering = asyncio.ensure_future(EventStream(events(), [answer])({}, receive, send))
        for _ in range(10):
            await asyncio.sleep(0)
        taken.set()
        await asyncio.wait_for(answering, 20)

    asyncio.run(leave())
    assert answer.up
