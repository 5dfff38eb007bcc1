"""An inquiry makes a worker try ports, in threads that do not delay the worker's end."""

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
    """Yield an event; connection attempts wait until it is set, and then fail."""
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
    plan = ("nowhere.example:1", "elsewhere.example:1")
    for number in range(4):
        assert asked.begin(b"", Inquiry(number, plan), condition, "", plan)
    asked.close()
    assert not woken.is_set()  # it has not waited for them
    answers.set()
    until(lambda: len(list(asked.answers())) > 0)


@pytest.mark.parametrize("asker", ["127.0.0.1", "::1", ""])
def test_only_the_asker_and_nodes_of_the_plan_are_tried(monkeypatch: pytest.MonkeyPatch, asker: str) -> None:
    tried: list[tuple[str, int]] = []

    def connect(address: tuple[str, int], _: float) -> socket.socket:
        tried.append(address)
        raise OSError

    monkeypatch.setattr(socket, "create_connection", connect)
    woken, condition = Event(), Condition(1, "", "", "", 0.0, 0.0, 1, 1, cast("Any", None), ())
    asked, plan = Inquiries(woken.set), ("laptop.local:9991", "192.0.2.8:9991")
    others = (
        "127.0.0.2:22", "localhost:22", "192.0.2.8:22", "laptop.local:22", "127.0.0.1.:22", "[::1%lo]:22", "127.1:22",
        "0.0.0.0:22", "nonsense", "",
    )  # fmt: skip
    own = {"127.0.0.1": ("127.0.0.1:22", "[::ffff:127.0.0.1]:22"), "::1": ("[::1]:22", "[0:0::1]:22"), "": ()}[asker]
    assert asked.begin(b"", Inquiry(1, (*others, *own, *plan)), condition, asker, plan)
    asked.close()
    assert woken.wait(30)
    ((_, answer),) = asked.answers()
    assert answer.untried == others
    assert answer.unreached == (*own, *plan)
    assert len(tried) == len(own) + len(plan)


def test_an_answer_after_the_end_wakes_no_thread() -> None:
    end, other = socket.socketpair()
    end.close()
    other.close()
    Daemon._wake(cast("Any", SimpleNamespace(_waker=end)))
