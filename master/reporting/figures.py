"""Figures of a run: the nodes' totals, reports between two snapshots, a description of the group, the timeline."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from allreduce.auto import Auto
from master.deployment.deploy import MASTER
from master.deployment.deployment import Deployment
from master.deployment.planner import units_of
from master.generation.thread import Ticket
from master.reporting.live import LiveFigures, since, whole_model
from master.reporting.report import MILLI, NodeReport, NodeShare, node_report
from master.reporting.spans import Span, before, nothing
from master.reporting.timeline import write_timeline
from master.workers.cluster import Cluster
from scheduler.model.timeline import OtherWaits
from tpi.errors import NodeError, UsageError
from tpi.net.fields import WindowState
from tpi.net.questions import Stats
from tpi.pack.reader import Pack
from tpi.partition import Range, Shard
from tpi.progress import phase
from tpi.trace import TRACE_SPANS, Trace
from worker.service.served import totals

_NO_LAYERS: tuple[tuple[Range, ...], Shard] = ((), Shard(Range(0, 0), Range(0, 0), Range(0, 0)))


class RunFigures:
    """Figures of one deployment and its nodes."""

    marked: list[Stats] | None = None  # totals of every node at the first token of the last answer

    def __init__(self, pack: Pack, cluster: Cluster, deployment: Deployment, bare: int, began: int) -> None:
        """Create the figures of a deployment.

        `bare` is the memory of this process before it loaded weights, in bytes. `began` is the start of the trace, in
        nanoseconds of the clock.
        """
        self._pack = pack
        self._cluster = cluster
        self._deployment = deployment
        self._bare = bare
        self._began = began

    def stats(self, waits: Sequence[OtherWaits] = ()) -> list[Stats]:
        """Return the totals of every node so far, rank 0 first.

        With `waits` (seconds per token for other nodes' disks, by rank), also compute each node's `steady`, which is
        slower.
        """
        return [self._own_stats(waits[0] if waits else None), *self._cluster.stats(waits[1:])]

    def mark(self) -> None:
        """Store the present totals, from which a later `report` counts.

        Ignore a lost worker, because the next step reports it.
        """
        with suppress(NodeError):
            self.marked = self.stats()

    def span(self) -> Span:
        """Return the totals at the last `mark()`, and the present ones."""
        after = self.stats()
        return self.marked or [nothing(stats) for stats in after], after

    def report(self, spans: Sequence[Span] = ()) -> list[NodeReport]:
        """Return every node's figures per token over all `spans`; without spans, since `mark` or the start."""
        after = self.stats()
        begun = before(after, spans) if spans else self.marked or [nothing(stats) for stats in after]
        after = self.stats(self._waits(begun, after))
        shares = self._shares()
        return [node_report(self._pack.config, *each) for each in zip(shares, begun, after, strict=True)]

    def live(self, begun: Sequence[Stats] | None) -> LiveFigures:
        """Return every node's figures per token since the totals `begun`; raise NodeError if a worker is lost.

        If `begun` is None or of another deployment, count from the start.
        """
        after, config, hidden = self.stats(), self._pack.config, self._pack.config.hidden
        counted, group, held = since(begun, after), self._deployment.node.loop.group, self._held()
        return LiveFigures(
            [node_report(config, *each) for each in zip(self._shares(), counted, after, strict=True)],
            [shard.experts for _, shard in (held.get(rank, _NO_LAYERS) for rank in range(len(after)))],
            after, after[0].tokens != counted[0].tokens, whole_model(config), group.algorithm(hidden), group.wire,
            group.links if isinstance(group, Auto) else None,
        )  # fmt: skip

    def windows(self) -> list[WindowState]:
        """Return the position of each node's memory window, rank 0 first. Any thread may call this at any time."""
        return [WindowState(*astuple(self._deployment.node.position)), *self._cluster.windows()]

    def fields(self) -> dict[str, Any]:
        """Return the fields of `--json` that describe the group.

        `predicted_sync_ms` is the time of all sums per token; None if the links were not measured.
        """
        node, hidden = self._deployment.node, self._pack.config.hidden
        group, predicted = node.loop.group, node.loop.group.predicted_s(hidden)
        return {
            "collective": group.algorithm(hidden),
            "prefill_collective": group.algorithm(self._deployment.limits.chunk * hidden),
            "wire": group.wire,
            "weights_sent_bytes": self._cluster.weights_sent,
            "predicted_sync_ms": None if predicted is None else MILLI * len(node.loop.blocks) * predicted,
            "choice": group.choice_fields(),
        }

    def describe(self) -> str:
        """Return a one-line description of the nodes: their number, stages, format, the master's collective."""
        nodes, stages, fields = 1 + len(self._cluster.workers), len(self._deployment.stages), self.fields()
        staged = f" in {stages} stages" if stages > 1 else ""
        alone = self._deployment.node.loop.group.trivial
        collective = "" if alone else f", {fields['collective']} over {fields['wire']}"
        sent = f", {fields['weights_sent_bytes'] / 1e6:.1f} MB of weights sent" if nodes > 1 else ""
        return f"{nodes} node{'s' if nodes > 1 else ''}{staged}, {self._pack.format}{collective}{sent}"

    @contextmanager
    def prompt_progress(self) -> Iterator[Callable[[Ticket], None]]:
        """Show the progress of computing a prompt.

        Yield a function to be called several times a second with the ticket whose prompt is computed. Each call updates
        the progress shown; when the prompt is computed, the progress disappears.
        """
        loop, chunk = self._deployment.node.loop, self._deployment.limits.chunk
        begun = loop.progress
        with ExitStack() as stack:
            report = stack.enter_context(phase("computing the prompt"))

            def watch(ticket: Ticket) -> None:
                if ticket.computed:
                    stack.close()
                elif ticket.first_admitted is not None:
                    chunks = -(-(len(ticket.asked.tokens) - ticket.cached) // chunk)
                    report(loop.progress - begun, chunks * len(loop.blocks))

            yield watch

    def write_trace(self, path: Path | None) -> str:
        """Write the timeline to `path` if the run was traced; return a sentence about missing spans, or "".

        Raises:
            UsageError: if the file cannot be written.
            NodeError: if a worker is lost.
        """
        trace = self._deployment.node.trace
        if path is None or not isinstance(trace, Trace):
            return ""
        try:
            dropped = write_timeline(path, trace, MASTER, self._cluster, self._began)
        except OSError as error:
            raise UsageError(f"cannot write the trace to {path}: {error.strerror}; give another --trace") from error
        return _missing(dropped) if dropped else ""

    def _shares(self) -> list[NodeShare]:
        units, held = units_of(self._pack), self._held()
        names = [peer.name for peer in self._cluster.peers(MASTER)]
        bare = [self._bare, *(hello.profile.process_bytes for hello in self._cluster.hellos)]
        return [
            NodeShare(name, rank, *held.get(rank, _NO_LAYERS), units.query_heads, units.kv_heads, taken)
            for rank, (name, taken) in enumerate(zip(names, bare, strict=True))
        ]

    def _held(self) -> dict[int, tuple[tuple[Range, ...], Shard]]:
        """Return, by rank, the layers that each node holds, one range for each of its stages, and its shard of these
        layers.
        """
        held: dict[int, tuple[tuple[Range, ...], Shard]] = {}
        for stage in self._deployment.stages:
            for rank, shard in zip(stage.ranks, stage.shards, strict=True):
                before, _ = held.get(rank, _NO_LAYERS)
                held[rank] = ((*before, stage.layers), shard)
        return held

    def _waits(self, begun: Sequence[Stats], after: Sequence[Stats]) -> list[OtherWaits]:
        """Return, by rank, the seconds per token that each node waits for disks, without the waits for its own blocks.

        They are computed from the totals `begun` and `after`.
        """
        head, rows = self._deployment.vocabulary.waits
        stalls = [
            max(0.0, now.stall_s - then.stall_s) / max(1, now.tokens - then.tokens)
            for then, now in zip(begun, after, strict=True)
        ]
        stalls[0] = max(0.0, stalls[0] - head - rows)
        others = [max([*stalls[:rank], *stalls[rank + 1 :]], default=0.0) for rank in range(len(stalls))]
        workers = (OtherWaits(tail=head + rows, others=others[rank]) for rank in range(1, len(stalls)))
        return [OtherWaits(head, rows, others=others[0]), *workers]

    def _own_stats(self, other_waits: OtherWaits | None) -> Stats:
        deployment = self._deployment
        own, head = deployment.node.figures(), deployment.vocabulary.streamed
        figures = replace(
            own,
            streamed_bytes=own.streamed_bytes + head.read_bytes,
            disk_s=head.read_seconds
            if head.ring_bytes
            else own.disk_s,  # the head's read clock counts the blocks' reads, too
            stall_s=own.stall_s + head.stall_seconds,
        )
        steady = None if other_waits is None else deployment.node.steady(other_waits)
        return totals(deployment.session, deployment.epoch, figures, steady)


def _missing(dropped: Mapping[str, int]) -> str:
    nodes = ", ".join(f"{count} of {node}" for node, count in dropped.items())
    return f"the trace lacks the last spans ({nodes}): a node stores at most {TRACE_SPANS}; trace a shorter run"
