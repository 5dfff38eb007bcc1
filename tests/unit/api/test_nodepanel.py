"""The figures of the node panel: read between two steps, seldom, and only of the present deployment."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from master.api.page import nodepanel as module
from master.api.page.nodepanel import NodePanel
from master.reporting.live import LiveFigures, since, whole_model
from master.reporting.report import NodeShare, node_report
from tests.support.weights.configs import tiny_config
from tpi.errors import NodeLost
from tpi.net.fields import WindowState
from tpi.net.questions import Stats
from tpi.partition import Range, Shard
from tpi.topology.links import Link, LinkTable

NONE = Stats(7, 1, 0, 0, 4000, 3000, 9000, 5000, 0.0, 0.0, 0.0, 0.0, 0, 0.0, 0, 0, 0, None, "")
SHARD = Shard(Range(0, 1), Range(0, 1), Range(0, 1), experts=Range(2, 5))


class _Nodes:
    """One node whose totals a test sets."""

    def __init__(self) -> None:
        self.now, self.asked, self.lost = NONE, 0, False
        self.at = WindowState()

    def windows(self) -> list[WindowState]:
        return [self.at]

    def live(self, begun: Sequence[Stats] | None) -> LiveFigures:
        self.asked += 1
        if self.lost:
            raise NodeLost("laptop", "laptop is gone; start it again")
        counted = since(begun, [self.now])
        report = node_report(
            tiny_config(), NodeShare("laptop", 0, (Range(0, 2),), SHARD, 1, 1, 1000), counted[0], self.now
        )
        moved = self.now.tokens != counted[0].tokens
        links, whole = LinkTable.uniform(2, Link(0.004, 50e6)), whole_model(tiny_config())
        return LiveFigures([report], [SHARD.experts], [self.now], moved, whole, "star", "f32", links)


class _Thread:
    """An engine's thread whose steps end when a test says so."""

    def __init__(self) -> None:
        pages = SimpleNamespace(total=8, free=6)
        admission = SimpleNamespace(running=[object()])
        deployment = SimpleNamespace(pages=pages, in_flight=1, most_in_flight=2)
        self.engine = SimpleNamespace(deployment=deployment, admission=admission, context=64)
        self.open, self.busy = 3, False
        self.problem: NodeLost | None = None
        self.waiting: list[Callable[[], None]] = []

    def call(self, function: Callable[[], Any]) -> "Future[Any]":
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except NodeLost as error:
                future.set_exception(error)

        self.waiting.append(run)
        if not self.busy:
            self.step()
        return future

    def step(self) -> None:
        while self.waiting:
            self.waiting.pop()()


@pytest.fixture
def nodes() -> _Nodes:
    return _Nodes()


@pytest.fixture
def thread() -> _Thread:
    return _Thread()


Read = Callable[[], dict[str, Any]]


@pytest.fixture
def read(nodes: _Nodes, thread: _Thread) -> Iterator[Read]:
    engine: Any = thread
    panel, loop = NodePanel(engine, lambda: nodes, "tiny"), asyncio.new_event_loop()
    try:
        yield lambda: loop.run_until_complete(panel.read())
    finally:
        loop.close()


@pytest.fixture(autouse=True)
def _always_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FRESH_S", 0.0)
    monkeypatch.setattr(module, "LOST_S", 0.0)


def test_it_says_which_node_holds_what(read: Read) -> None:
    shown = read()
    assert shown["model"] == "tiny"
    assert (shown["running"], shown["waiting"], shown["fresh"], shown["problem"]) == (1, 2, True, None)
    assert shown["pages"] == {"held": 2, "total": 8, "tokens": 32}
    assert shown["whole"]["heads"] == 4
    (node,) = shown["nodes"]
    assert (node["name"], node["heads"], node["experts"]) == ("laptop", [0, 1], [2, 5])
    assert (node["layers"], shown["steps"]) == ([[0, 2]], {"in_flight": 1, "most": 2})
    assert (node["used_bytes"], node["planned_bytes"], node["resident_bytes"]) == (4000, 9000, 3000)
    assert node["links"] == [{"latency_ms": 4.0, "mb_per_s": 50.0}]


def test_times_are_of_the_tokens_since_the_last_look(read: Read, nodes: _Nodes) -> None:
    nodes.now = replace(NONE, tokens=10, compute_s=1.0, sync_s=0.5, stall_s=0.25)
    assert _times(read()) == (100.0, 50.0, 25.0)
    nodes.now = replace(nodes.now, tokens=20, compute_s=1.1, sync_s=0.7, stall_s=0.25)
    assert _times(read()) == pytest.approx((10.0, 20.0, 0.0))
    assert _times(read()) == pytest.approx((10.0, 20.0, 0.0))  # nothing was computed: the last times stay


def test_another_deployment_is_counted_from_its_start(read: Read, nodes: _Nodes) -> None:
    nodes.now = replace(NONE, tokens=10, compute_s=1.0)
    read()
    nodes.now = replace(NONE, epoch=2, tokens=5, compute_s=0.1)
    assert _times(read())[0] == pytest.approx(20.0)


def test_many_watchers_cause_one_question(read: Read, nodes: _Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FRESH_S", 1000.0)
    for _ in range(5):
        assert read()["fresh"]
    assert nodes.asked == 1


def test_a_long_step_is_not_waited_for(
    read: Read, nodes: _Nodes, thread: _Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAIT_S", 0.01)
    read()
    thread.busy = True
    assert [read()["fresh"], read()["fresh"]] == [False, False]
    assert len(thread.waiting) == 1  # one question, however often it is asked
    assert read()["nodes"][0]["name"] == "laptop"  # as it was
    thread.step()
    monkeypatch.setattr(module, "WAIT_S", 60.0)
    assert read()["fresh"]
    assert nodes.asked == 2


def test_a_lost_node_is_said(read: Read, nodes: _Nodes) -> None:
    read()
    nodes.lost = True
    shown = read()
    assert not shown["fresh"]
    assert "laptop is gone" in shown["problem"]
    assert shown["nodes"]
    nodes.lost = False
    assert read()["problem"] is None


def test_a_lost_node_is_not_asked_again_at_once(read: Read, nodes: _Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOST_S", 1000.0)
    nodes.lost = True
    assert [read()["fresh"], read()["fresh"]] == [False, False]
    assert nodes.asked == 1


def test_a_deployment_that_failed_is_not_asked(read: Read, nodes: _Nodes, thread: _Thread) -> None:
    thread.problem = NodeLost("laptop", "laptop is gone; start it again")
    assert "laptop is gone" in read()["problem"]
    assert nodes.asked == 0


def _times(shown: dict[str, Any]) -> tuple[float, float, float]:
    (node,) = shown["nodes"]
    return node["compute_ms"], node["network_ms"], node["disk_ms"]


def test_the_window_slides_also_while_a_step_runs(
    read: Read, nodes: _Nodes, thread: _Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAIT_S", 0.01)
    nodes.now = replace(NONE, tokens=1)
    assert read()["nodes"][0]["window"] == {"next": 0, "ready": 0, "blocks": 0}
    thread.busy = True
    for following in range(3):
        nodes.at = WindowState(following, 4, 40)
        assert read()["nodes"][0]["window"] == {"next": following, "ready": 4, "blocks": 40}
    thread.step()
