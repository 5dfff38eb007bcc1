"""Who asks a worker how it is has ports tried by threads: they hold up no end of the worker."""

import socket
from collections.abc import Iterator
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.house import until
from tpi.net.questions import Condition, Inquiry
from worker.service import inquiries
from worker.service.daemon import Daemon
from worker.service.inquiries import Inquiries


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """A name server that answers once this is set."""
    answered = Event()

    def look_up(*_: object) -> socket.socket:
        answered.wait()
        raise OSError

    monkeypatch.setattr(socket, "create_connection", look_up)
    yield answered
    answered.set()


def test_a_name_server_that_says_nothing_holds_up_no_end(answers: Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquiries, "_CLOSE_S", 0.05)
    woken = Event()
    asked = Inquiries(woken.set)
    condition = Condition(1, "", "", "", 0.0, 0.0, 1, 1, cast("Any", None), ())
    for number in range(4):
        assert asked.begin(b"", Inquiry(number, ("nowhere.example:1", "elsewhere.example:1")), condition)
    asked.close()
    assert not woken.is_set()  # it has not waited for them
    answers.set()
    until(lambda: len(list(asked.answers())) > 0)


def test_an_answer_after_the_end_wakes_nobody() -> None:
    end, other = socket.socketpair()
    end.close()
    other.close()
    Daemon._wake(cast("Any", SimpleNamespace(_waker=end)))
