"""A worker that has joined can neither block its master nor fill its memory. The tests use real sockets."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from master.reporting.timeline import write_timeline
from master.workers.cluster import Cluster
from master.workers.weights import WeightServer
from tests.support.cluster.cluster_helpers import MadeUpModel
from tests.support.processes.hostile_worker import Hostile, hostile
from tpi.errors import NodeError, WeightsError
from tpi.net.channel import Channel
from tpi.net.messages import (
    Assign,
    PeerAddress,
    Ready,
)
from tpi.net.questions import AskSpans, Spans
from tpi.net.sockets import WEIGHTS, Net
from tpi.net.transfers import Missing, Need, Offer, Unavailable, UnitData
from tpi.trace import PAGE_SPANS, Trace

PEERS = (PeerAddress(0, "master", ""), PeerAddress(1, "a", "tcp://127.0.0.1:9"))


@pytest.mark.parametrize(("blocks", "tokens"), [(4, 0), (0, 32), (0, 0)])
def test_one_that_offers_to_compute_nothing_is_named(blocks: int, tokens: int) -> None:
    def ready(_: Hostile, message: object) -> list[object]:
        return [Ready(message.session, 1, blocks, tokens, 1, 1, 0)] if isinstance(message, Assign) else []

    model, refusal = MadeUpModel(), rf"worker stranger .*steps of {tokens} tokens and {blocks} pages"
    with (
        hostile(ready) as worker,
        Cluster.connect([worker.address]) as cluster,
        pytest.raises(NodeError, match=refusal),
    ):
        cluster.assign(model.split(cluster.session, 1, cluster.peers(), 8)[1:], model)


def test_pages_of_spans_without_end_do_not_fill_the_master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpi.trace.TRACE_SPANS", 2 * PAGE_SPANS)
    page = np.zeros((PAGE_SPANS, 4), np.int64)

    def endless(_: Hostile, message: object) -> list[object]:
        if isinstance(message, AskSpans):
            return [Spans(message.session, message.epoch, 1, 0, ("\x1b[2Jx",), page[: message.count])]
        return []

    with hostile(endless) as worker, Cluster.connect([worker.address]) as cluster:
        write_timeline(tmp_path / "trace.json", Trace(1), "master", cluster, 0)
    text = (tmp_path / "trace.json").read_text()
    assert text.count('"ph": "X"') == 2 * PAGE_SPANS
    assert "\x1b" not in text


@contextmanager
def feeding(model: MadeUpModel) -> Iterator[tuple[WeightServer, Channel, bytes]]:
    """A feeder that serves rank 1 of `model`, and the other end of its connection, with its identity there."""
    net = Net()
    router, port = net.bind(WEIGHTS, "127.0.0.1", 0)
    socket, monitor = net.connect_watched(WEIGHTS, "127.0.0.1", port, b"master")
    feeder, other = WeightServer(Channel(socket), monitor, 1), Channel(router)
    feeder.begin(model.split(1, 1, PEERS, model.layouts[0].units)[1], model)
    try:
        while (found := other.wait(0.01)) is None:
            feeder.serve()
        assert isinstance(found[1], Offer)
        yield feeder, other, found[0]
    finally:
        feeder.close()
        net.close()


def answer(feeder: WeightServer, other: Channel, peer: bytes, need: Need) -> object:
    other.send(need, peer)
    while (found := other.wait(0.01)) is None:
        feeder.serve()
    return found[1]


def test_more_at_once_than_a_transfer_is_refused() -> None:
    model = MadeUpModel(layers=1, width=64, units=512)
    with feeding(model) as (feeder, other, peer):
        block = model.ids[1]
        refused = answer(feeder, other, peer, Need(block, "neuron", 0, 1024))
        assert isinstance(refused, Unavailable)
        assert "over the limit" in refused.reason
        assert isinstance(answer(feeder, other, peer, Need(block, "neuron", 0, 8)), UnitData)
        other.send(Missing(1, 1, 1, 2**62), peer)
        answer(feeder, other, peer, Need(block, "neuron", 0, 1))
        assert feeder.stats.missing < 64 << 20


def test_one_that_asks_without_end_is_let_go() -> None:
    model = MadeUpModel(layers=1, width=64, units=4)
    need = Need(model.ids[1], "neuron", 0, 8)
    with feeding(model) as (feeder, other, peer), pytest.raises(WeightsError, match="again and again"):
        ask_forever(feeder, other, peer, need)


def ask_forever(feeder: WeightServer, other: Channel, peer: bytes, need: Need) -> None:
    for _ in range(200):
        answer(feeder, other, peer, need)


def test_requests_of_an_earlier_plan_are_ignored() -> None:
    """A worker may request units of the old plan before it gets the new plan. That is not an error."""
    model = MadeUpModel(layers=1, units=8)
    with feeding(model) as (feeder, other, peer):
        feeder.begin(model.split(1, 2, PEERS, 2)[1], model)
        other.send(Need(model.ids[1], "neuron", 8, 12), peer)
        data = answer(feeder, other, peer, Need(model.ids[1], "neuron", 0, 4))
        assert isinstance(data, UnitData)
        assert (data.first, data.last) == (0, 4)
        assert isinstance(answer(feeder, other, peer, Need(model.ids[1], "neuron", 0, 17)), Unavailable)
