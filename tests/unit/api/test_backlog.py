"""An answer that is not read is ended before it fills the memory. An answer that is read is complete, however long."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from master.api.answers.answering import Backlog
from master.api.answers.events import Event, ReasoningPiece, TextPiece, TokenLogprob, ToolCall
from master.api.failures import RequestError
from tpi.errors import NodeLost

MOST = 4000
BEST = tuple((str(number), b"x", -1.0) for number in range(20))
PIECES: list[Event] = [
    TextPiece("x" * 300),
    TextPiece("x", (TokenLogprob("x", b"x", -1.0, BEST[:4]),)),
    ReasoningPiece("y" * 100),
    ToolCall("f", "{}" * 50),
]


@given(st.lists(st.sampled_from([*PIECES, None]), max_size=60))
def test_what_is_read_is_what_was_made(steps: list[Event | None]) -> None:
    """None stands for a read. Nothing is lost or out of order until too much is unread; then the last entry says so."""

    async def run() -> None:
        backlog, unread = Backlog(MOST), list[Event]()
        for step in steps:
            if step is None and unread:
                assert await backlog.get() == [unread.pop(0)]
            elif step is not None and backlog.put([step]):
                unread.append(step)
            if backlog.overflowed:
                break
        assert len(unread) <= MOST / 256
        assert [await backlog.get() for _ in unread] == [[event] for event in unread]
        if backlog.overflowed:
            with pytest.raises(RequestError, match="read faster"):
                await backlog.get()

    asyncio.run(run())


def test_it_overflows_once_and_keeps_no_more() -> None:
    async def run() -> int:
        backlog, put = Backlog(MOST), 0
        piece = TextPiece("x", (TokenLogprob("x", b"x", -1.0, BEST),))
        while backlog.put([piece]):
            put += 1
        assert not backlog.put([piece])
        assert not backlog.put(NodeLost("a", "a is lost"))
        for _ in range(put):
            await backlog.get()
        with pytest.raises(RequestError):
            await backlog.get()
        return put

    assert asyncio.run(run()) == 0  # a token with 20 logarithms is more than all of this room


def test_an_error_comes_after_what_was_made_before_it() -> None:
    async def run() -> None:
        backlog = Backlog()
        backlog.put([TextPiece("x")])
        backlog.put(NodeLost("a", "a is lost"))
        assert await backlog.get() == [TextPiece("x")]
        with pytest.raises(NodeLost):
            await backlog.get()

    asyncio.run(run())


def test_a_reading_client_gets_any_length() -> None:
    async def run() -> None:
        backlog = Backlog(MOST)
        for _ in range(100):
            assert backlog.put([TextPiece("x" * (MOST // 2))])
            await backlog.get()
        assert not backlog.overflowed

    asyncio.run(run())
