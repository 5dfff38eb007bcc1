"""The queue of transfers: which transfer starts when, which ones fail with another, and a clean close."""

import threading
from contextlib import closing
from threading import Event

import pytest

from scheduler.transfer.queue import QueuedTransfer, TransferQueue
from tpi.errors import TpiError
from tpi.trace import Trace

PATIENCE = 20  # seconds that a test waits before it fails


class Gate:
    """A call that reports its beginning and continues when a test says so."""

    def __init__(self) -> None:
        self.began, self.opened = Event(), Event()

    def __call__(self) -> None:
        self.began.set()
        assert self.opened.wait(PATIENCE)


def test_loads_of_a_kind_go_in_order_and_kinds_in_parallel() -> None:
    gates = [Gate() for _ in range(3)]
    with closing(TransferQueue()) as queue:
        queue.submit("weight load", "first", gates[0])
        queue.submit("weight load", "second", gates[1])
        queue.submit("kv load", "third", gates[2])
        assert gates[0].began.wait(PATIENCE)
        assert gates[2].began.wait(PATIENCE)
        assert not gates[1].began.is_set()
        gates[0].opened.set()
        assert gates[1].began.wait(PATIENCE)
        for gate in gates:
            gate.opened.set()


def test_saves_go_several_at_once() -> None:
    gates = [Gate() for _ in range(3)]
    with closing(TransferQueue()) as queue:
        for number, gate in enumerate(gates):
            queue.submit("kv save", f"save {number}", gate)
        assert all(gate.began.wait(PATIENCE) for gate in gates)
        for gate in gates:
            gate.opened.set()


def test_a_load_goes_before_a_save_that_was_asked_for_earlier() -> None:
    blockers, order = [Gate() for _ in range(3)], []
    with closing(TransferQueue()) as queue:
        for blocker in blockers:
            queue.submit("kv save", "blocker", blocker)
        assert all(blocker.began.wait(PATIENCE) for blocker in blockers)
        late = [queue.submit("kv save", "save", lambda: order.append("save"))]
        late.append(queue.submit("kv load", "load", lambda: order.append("load")))
        blockers[0].opened.set()
        for transfer in late:
            transfer.wait()
        assert order == ["load", "save"]
        for blocker in blockers:
            blocker.opened.set()


def test_what_waits_for_a_failure_fails_with_it_and_is_not_made() -> None:
    def fail() -> None:
        raise TpiError("the card fell off")

    made: list[str] = []
    with closing(TransferQueue()) as queue:
        first = queue.submit("kv save", "one", fail)
        second = queue.submit("kv load", "two", lambda: made.append("two"), [first])
        third = queue.submit("weight load", "three", lambda: made.append("three"))
        for transfer in (first, second):
            for _ in range(2):
                with pytest.raises(TpiError, match="the card fell off"):
                    transfer.wait()
        third.wait()
    assert made == ["three"]


def test_a_transfer_that_waits_lets_others_of_another_kind_go() -> None:
    gate, made = Gate(), []
    with closing(TransferQueue()) as queue:
        save = queue.submit("kv save", "save", gate)
        load = queue.submit("kv load", "load", lambda: made.append("load"), [save])
        queue.submit("weight load", "weights", lambda: made.append("weights")).wait()
        gate.opened.set()
        load.wait()
    assert made == ["weights", "load"]


def test_closing_wakes_waiting_threads_and_joins_all() -> None:
    before, gate = set(threading.enumerate()), Gate()
    queue = TransferQueue()
    running = queue.submit("weight load", "running", gate)
    waiting = queue.submit("weight load", "waiting", gate)
    assert gate.began.wait(PATIENCE)
    gate.opened.set()
    running.wait()
    waiting.join()
    blocked = queue.submit("kv load", "never", lambda: None, [never_over()])
    queue.close()
    queue.close()
    with pytest.raises(TpiError, match="the kv load of never did not run: the transfer queue was closed"):
        blocked.wait()
    with pytest.raises(TpiError, match="late cannot be transferred: the transfer queue is closed"):
        queue.submit("kv save", "late", lambda: None)
    assert set(threading.enumerate()) <= before


def test_every_kind_has_its_spans() -> None:
    trace = Trace()
    with closing(TransferQueue(trace)) as queue:
        for kind in ("weight load", "kv load", "kv save"):
            queue.submit(kind, f"a {kind}", lambda: None).wait()
    assert {(kind, name) for kind, name, _, _ in trace.rows} == {
        (kind, f"a {kind}") for kind in ("weight load", "kv load", "kv save")
    }


def test_each_link_has_its_loads_and_they_go_beside_each_other() -> None:
    gates = [Gate() for _ in range(4)]
    with closing(TransferQueue(links=2)) as queue:
        for number, gate in enumerate(gates):
            queue.submit("weight load", f"load {number}", gate, link=number // 2)
        assert gates[0].began.wait(PATIENCE)
        assert gates[2].began.wait(PATIENCE)
        assert not gates[1].began.is_set()
        assert not gates[3].began.is_set()
        for gate in gates:
            gate.opened.set()


def test_a_later_transfer_waits_for_an_end_and_not_for_success() -> None:
    gate, made = Gate(), []

    def fail() -> None:
        gate()
        raise TpiError("the disk is gone")

    with closing(TransferQueue(links=2)) as queue:
        first = queue.submit("weight load", "first", fail)
        second = queue.submit("weight load", "second", lambda: made.append("second"), link=1, behind=first)
        assert gate.began.wait(PATIENCE)
        assert not second.done
        gate.opened.set()
        second.wait()
    assert made == ["second"]


def never_over() -> QueuedTransfer:
    return QueuedTransfer("kv save", "never over", lambda: None, ())
