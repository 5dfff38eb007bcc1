"""Live figures of every node for the page, read between two steps at most once a second."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from master.api.failures import public
from master.generation.thread import EngineThread
from master.reporting.live import LiveFigures
from master.reporting.report import MEGA, MILLI, NodeReport
from tpi.errors import NodeError, TpiError
from tpi.kernels.spec import PAGE_TOKENS
from tpi.net.fields import WindowState
from tpi.net.questions import Stats
from tpi.partition import Range
from tpi.topology.links import LinkTable

FRESH_S = 0.8  # time for which the same figures are shown, before they are read again
LOST_S = 10.0  # pause after a node did not answer, because asking it again would hold up the steps
WAIT_S = 2.0  # time to wait for the step in progress; then the last figures are shown


class LiveSource(Protocol):
    """A source of live figures, such as `master.reporting.figures.RunFigures`."""

    def live(self, begun: Sequence[Stats] | None) -> LiveFigures:
        """Return the present figures, with times per token since `begun`; raise NodeError if a worker is lost."""

    def windows(self) -> list[WindowState]:
        """Return the state of each node's memory window, rank 0 first. May be called during a step."""


class NodePanel:
    """Reader of the nodes' live figures for the page. Call all methods but `_take` on the server's event loop."""

    def __init__(self, engine: EngineThread, source: Callable[[], LiveSource], model: str) -> None:
        self._engine, self._source, self._model = engine, source, model
        self._pending: asyncio.Future[LiveFigures] | None = None
        self._begun: Sequence[Stats] | None = None  # totals when tokens were last computed
        self._shown: LiveFigures | None = None
        self._problem: str | None = None
        self._next = float("-inf")  # loop time from which the figures may be read again

    async def read(self) -> dict[str, Any]:
        """Return the figures as JSON. `fresh` is false while a step takes long, or if a worker is lost."""
        loop, windows = asyncio.get_running_loop(), self._source().windows()  # read at once, during a step
        if self._pending is None and self._engine.problem is None and loop.time() >= self._next:
            self._pending = asyncio.wrap_future(self._engine.call(self._take))
        pending = self._pending
        if pending is not None:
            await asyncio.wait([pending], timeout=WAIT_S)
            if pending is self._pending and pending.done():
                self._pending = None
                self._settle(pending)
                self._next = loop.time() + (LOST_S if self._problem else FRESH_S)
        return self._fields(self._pending is None and self._problem is None, windows)

    def _take(self) -> LiveFigures:
        return self._source().live(self._begun)

    def _settle(self, done: "asyncio.Future[LiveFigures]") -> None:
        try:
            taken = done.result()
        except TpiError as error:
            self._problem = _told(error)
            return
        self._problem = None
        if self._shown is None or taken.moved or taken.epoch != self._shown.epoch:
            self._shown, self._begun = taken, taken.totals  # otherwise no token was computed, and the old times stay

    def _fields(self, fresh: bool, windows: Sequence[WindowState]) -> dict[str, Any]:
        engine, shown, problem = self._engine.engine, self._shown, self._engine.problem
        deployment, running = engine.deployment, len(engine.admission.running)
        pages = deployment.pages
        own = {
            "model": self._model,
            "context": engine.context,
            "fresh": fresh,
            "problem": self._problem or (_told(problem) if problem else None),
            "running": running,
            "waiting": max(0, self._engine.open - running),
            "steps": {"in_flight": deployment.in_flight, "most": deployment.most_in_flight},
            "pages": {"held": pages.total - pages.free, "total": pages.total, "tokens": PAGE_TOKENS},
        }
        return own | (_figures(shown, windows) if shown else {"nodes": []})


def _figures(shown: LiveFigures, windows: Sequence[WindowState]) -> dict[str, Any]:
    each = zip(shown.nodes, shown.experts, shown.used_bytes, strict=True)
    nodes = [_node(*one) | {"links": _links(shown.links, rank)} for rank, one in enumerate(each)]
    for node, at in zip(nodes, windows, strict=False):  # a worker may have been lost meanwhile
        node["window"] = {"next": at.following, "ready": at.ready, "blocks": at.blocks}
    return {
        "tokens": shown.totals[0].tokens,
        "whole": shown.whole,
        "collective": shown.collective,
        "wire": shown.wire,
        "nodes": nodes,
    }


def _links(links: LinkTable | None, rank: int) -> list[dict[str, float]]:
    """Return a node's measured links to the other nodes, in rank order: latency in ms, and throughput in MB/s."""
    found = links.of(rank) if links and rank < links.size else ()
    return [{"latency_ms": MILLI * one.latency_s, "mb_per_s": one.bytes_per_s / MEGA} for one in found]


def _node(node: NodeReport, experts: Range, used_bytes: int) -> dict[str, Any]:
    """Return a node's figures for the page. Ranges are [first, last + 1); times are in ms per token, sizes in bytes.

    `layers` has one range for each of the node's stages.
    """
    return {
        "name": node.name,
        "layers": node.layers,
        "heads": node.heads,
        "kv_heads": node.kv_heads,
        "neurons": node.neurons,
        "experts": experts.as_list(),
        "weight_bytes": node.weight_bytes,
        "resident_bytes": node.resident_bytes,
        "planned_bytes": node.planned_bytes,
        "used_bytes": used_bytes,
        "compute_ms": node.compute_ms_per_token,
        "network_ms": node.sync_ms_per_token,
        "disk_ms": node.io_stall_ms_per_token,
        "hop_ms": node.hop_ms_per_token,
        "streamed_bytes": node.streamed_bytes_per_token,
        "disk_mb_per_s": node.disk_mb_per_s,
        "sent_bytes": node.sent_bytes_per_token,
        "received_bytes": node.received_bytes_per_token,
        "accelerator": node.accelerator,
    }


def _told(problem: TpiError) -> str:
    """Return the message for the page about an error.

    A NodeError is shown in full, because the page shows the names of nodes in any case.
    """
    return str(problem) if isinstance(problem, NodeError) else public(problem)
