"""One run of the master, from opening the model to letting the workers go: what all commands have in common."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np

from allreduce import shared
from allreduce.base import Endpoints
from master.assignments import assignments
from master.batcher import Batcher
from master.cluster import Cluster
from master.dtype import choose_dtype
from master.ends import Ends, table_bytes
from master.engine import Engine, Fence
from master.local import LocalWorkers
from master.options import DEFAULT_CONTEXT, Placement
from master.pages import PagePool
from master.planner import parse_split, plan, refuse_too_many, units_of
from master.report import MILLI, Member, NodeReport, node_report
from master.spans import Span, before, nothing
from master.timeline import write_timeline
from master.tokenizer import Tokenizer
from master.weights import PackSource, own_blocks
from scheduler.budget import LONGEST_CHUNK
from scheduler.free import default_budget
from tpi.devices.host import HostDevice, open_host
from tpi.errors import PlanError, UsageError
from tpi.kv import KvDtype, blocks_for
from tpi.machine import usable_cores
from tpi.messages import Assign, NodeOptions, Stats, Step
from tpi.pack.locate import locate, open_located
from tpi.pack.reader import Pack
from tpi.partition import Shard
from tpi.progress import phase
from tpi.sockets import Net, Tap
from tpi.trace import TRACE_SPANS, Trace, clock
from worker.cache import ShardCache
from worker.member import totals
from worker.node.build import build_node
from worker.plan.fit import fit
from worker.plan.node_plan import node_plan
from worker.profile import limited, memory_budget, rss
from worker.shelf import keep_within

MASTER = "master"


class Session:
    """A context manager: inside it the cluster is ready; leaving it stops local workers and frees the others."""

    pack: Pack
    tokenizer: Tokenizer
    engine: Engine
    marked: list[Stats] | None = None  # figures of every node when the first token of the last answer was there

    def __init__(self, placement: Placement, tap: Tap | None = None, host: HostDevice | None = None) -> None:
        """`tap` sees every frame of the control and weights planes, for tests; `host` computes in place of the real."""
        self.placement = placement
        self._host = host or open_host()
        self._tap = tap
        self._stack = ExitStack()

    def __enter__(self) -> "Session":
        with self._stack as stack:
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    @property
    def names(self) -> tuple[str, ...]:
        """What the nodes are called, rank 0 first."""
        return tuple(member.name for member in self._members)

    def stats(self, verdict: bool = False) -> list[Stats]:
        """Totals of every node so far, rank 0 first; with `verdict` their `steady` too, which takes longer."""
        return [self._own_stats(verdict), *self._cluster.stats(verdict)]

    @contextmanager
    def prompt_progress(self, tokens: int) -> Iterator[Callable[[], None]]:
        """Show how far a prompt of `tokens` tokens is, until what is yielded is called, or the context is left."""
        loop = self._own.loop
        begun, total = loop.progress, -(-tokens // self._chunk) * len(loop.blocks)
        with ExitStack() as stack:
            report = stack.enter_context(phase("computing the prompt"))
            stack.callback(setattr, loop, "on_block", loop.on_block)
            loop.on_block = lambda: report(loop.progress - begun, total)
            yield stack.close

    def mark(self) -> None:
        """Remember the totals: what a later `report` says is counted from here."""
        self.marked = self.stats()

    def span(self) -> Span:
        """The totals at `mark`, and now."""
        after = self.stats()
        return self.marked or [nothing(stats) for stats in after], after

    def report(self, spans: Sequence[Span] = ()) -> list[NodeReport]:
        """Every node's figures, per token, of all `spans` together; without any, since `mark`, or since the start."""
        after = self.stats(verdict=True)
        begun = before(after, spans) if spans else self.marked or [nothing(stats) for stats in after]
        return [
            node_report(self.pack.config, member, *pair)
            for member, *pair in zip(self._members, begun, after, strict=True)
        ]

    def fields(self) -> dict[str, Any]:
        """The fields of `--json` that describe the group; `predicted_sync_ms` is per token, None where not measured."""
        group, config = self._own.loop.group, self.pack.config
        predicted = group.predicted_s(config.hidden)
        return {
            "collective": group.algorithm(config.hidden),
            "prefill_collective": group.algorithm(self._chunk * config.hidden),
            "wire": group.wire,
            "predicted_sync_ms": None if predicted is None else MILLI * 2 * config.layers * predicted,
            "choice": group.choice_fields(),
        }

    def write_trace(self) -> str:
        """Write the timeline that `--trace` asked for, if it did; returns a sentence on what it lacks, if anything.

        Raises:
            UsageError: if the file cannot be written.
            NodeError: if a worker is lost.
        """
        path, trace = self.placement.trace, self._own.trace
        if path is None or not isinstance(trace, Trace):
            return ""
        try:
            dropped = write_timeline(path, trace, MASTER, self._cluster, self._began)
        except OSError as error:
            raise UsageError(f"cannot write the trace to {path}: {error.strerror}; give another --trace") from error
        return _missing(dropped) if dropped else ""

    def describe(self) -> str:
        """The group in a few words."""
        nodes, fields = len(self._members), self.fields()
        return (
            f"{nodes} node{'s' if nodes > 1 else ''}, {self.pack.format}, {fields['collective']} over {fields['wire']}"
        )

    def _open(self, stack: ExitStack) -> None:
        placement = self.placement
        located = locate(placement.model, placement.cache)
        shares = parse_split(placement.split, 1 + (placement.local or len(placement.workers)))
        refuse_too_many(located, placement.dtype, placement.cache, shares)
        self._cluster = stack.enter_context(Cluster.connect(self._addresses(stack), Net(self._tap)))
        dtype = choose_dtype(placement.dtype, located, self._memories(), shares)
        self.pack = open_located(located, dtype, placement.cache, room=self._make_room)
        self.tokenizer = Tokenizer.load(self.pack)
        self.context = _context(placement.context, self.pack.config.context)
        shards = plan(self.pack.config, units_of(self.pack), shares)
        plans = self._plans(shards, self._board(stack))
        self._check_memory(plans)
        self._bare = rss()
        self._join(stack, plans)
        self._settle(plans[0])
        self._members = self._named(shards)
        self._build_engine(stack, plans[0])

    def _addresses(self, stack: ExitStack) -> list[str]:
        placement = self.placement
        if not placement.local:
            return list(placement.workers)
        workers = LocalWorkers(placement.local, placement.cache, self._threads(), self._lent())
        return stack.enter_context(workers).addresses

    def _memory(self) -> int:
        """Bytes for each node of this machine: what the user said, or its part of what is free."""
        return self.placement.memory or default_budget() // (1 + self.placement.local)

    def _lent(self) -> int:
        """What binds the nodes of this machine; 0, no limit, if the user wants every weight in memory."""
        return self._memory() if self.placement.scheduler else 0

    def _memories(self) -> list[int]:
        """Bytes that each node may use, rank 0 first."""
        return [self._memory(), *(memory_budget(hello.profile) for hello in self._cluster.hellos)]

    def _threads(self) -> int:
        """Compute threads of the master, and of each local worker: nodes of one machine share its cores."""
        return self.placement.threads or max(1, usable_cores() // (1 + self.placement.local))

    def _board(self, stack: ExitStack) -> str:
        """Address of the memory in which the nodes of this machine sum; empty where they do not."""
        local, asked = self.placement.local, (self.placement.collective, self.placement.wire)
        wanted = asked[0] in (None, "shared") and asked[1] in (None, "f32")  # nothing travels: there is no other wire
        if not local or not wanted or not shared.available():
            return ""
        return stack.enter_context(shared.BoardMemory(1 + local)).address

    def _plans(self, shards: Sequence[Shard], board: str) -> list[Assign]:
        options = NodeOptions(
            context=self.context,
            kv_blocks=blocks_for(self.context),
            kv_dtype=self.placement.kv_dtype or kv_dtype(self.pack),
            prefill_tokens=LONGEST_CHUNK,
            memory=self.placement.memory or 0,
            threads=self.placement.threads or 0,
            scheduler="window" if self.placement.scheduler else "resident",
            window=self.placement.window,
            retain=self.placement.retain,
            trace=self.placement.trace is not None,
            verify_weights=self.placement.verify_weights,
        )
        cluster = self._cluster
        plans = assignments(
            self.pack,
            shards,
            cluster.peers(MASTER, board),
            options,
            cluster.session,
            cluster.epoch + 1,
            self.placement.collective or ("shared" if board else "auto"),
            wire(self.placement.wire, self.pack),
        )
        return [replace(plans[0], options=replace(options, threads=self._threads(), memory=self._lent())), *plans[1:]]

    def _check_memory(self, plans: Sequence[Assign]) -> None:
        """Refuse before any weight moves what a node's memory cannot hold."""
        workers = zip(plans[1:], self._cluster.hellos, strict=True)
        taken = [replace(plan, options=limited(plan.options, hello.profile)) for plan, hello in workers]
        for peer, own in zip(self._cluster.peers(MASTER), [plans[0], *taken], strict=True):
            tables = table_bytes(self.pack) if own.rank == 0 else None
            try:
                fit(node_plan(own), tables)
            except PlanError as error:
                raise PlanError(f"{peer.name}: {error}") from None

    def _join(self, stack: ExitStack, plans: Sequence[Assign]) -> None:
        """Load every node's shard, this one's included, and settle how they sum."""
        cluster, cache = self._cluster, ShardCache(self.placement.cache / "shards")
        stack.callback(cache.close)
        self._began = clock()  # before any node records
        cluster.begin(plans[1:], PackSource(self.pack))
        with phase("loading weights") as progress:
            held = own_blocks(self.pack, plans[0], cache, progress)
            endpoints = Endpoints(net=cluster.net, watch=cluster.watch, links_cache=self.placement.links_cache)
            self._own = build_node(plans[0], held, endpoints, progress, table_bytes(self.pack), host=self._host)
        stack.callback(self._own.close)
        with phase("sending weights to the workers") as progress:
            ready = cluster.finish(progress)
        self._kv_blocks = min([self._own.kv_blocks, *(node.kv_blocks for node in ready)])
        self._chunk = min([self._own.prefill_tokens, *(node.prefill_tokens for node in ready)])

        if cache.made or any(remote.feeder and remote.feeder.stats.sent for remote in cluster.remotes):
            self._make_room()

    def _make_room(self, nbytes: int = 0) -> None:
        """Keep the cache within its limit, with room for `nbytes` more; what cannot be removed stays."""
        with suppress(OSError):
            keep_within(self.placement.cache, self.placement.cache_limit, nbytes)

    def _settle(self, own: Assign) -> None:
        """A first step without tokens, in which all nodes measure their links and choose a collective."""
        nothing = np.empty((0, own.config.hidden), np.float32)
        step = Step(own.session, own.epoch, 0, (), (), nothing)
        with phase("measuring the links"):
            self._cluster.step(step)
            self._own.run(step)

    def _build_engine(self, stack: ExitStack, own: Assign) -> None:
        node, verify = self._own, self.placement.verify_weights
        ends = Ends(self.pack, node.budget, node.trace, node.window.reads, verify, self._host)
        self._ends = stack.enter_context(ends)
        self.engine = Engine(
            embedding=ends.embedding,
            head=ends.head,
            node=self._own,
            workers=self._cluster,
            batcher=Batcher(PagePool(self._kv_blocks), self._chunk),
            context=self.context,
            fence=Fence(own.session, own.epoch),
            longest=self.pack.config.context,
        )

    def _named(self, shards: Sequence[Shard]) -> list[Member]:
        units = units_of(self.pack)
        names = [peer.name for peer in self._cluster.peers(MASTER)]
        bare = [self._bare, *(hello.profile.process_bytes for hello in self._cluster.hellos)]
        return [
            Member(name, rank, shard, units.query_heads, units.kv_heads, taken)
            for rank, (name, shard, taken) in enumerate(zip(names, shards, bare, strict=True))
        ]

    def _own_stats(self, verdict: bool) -> Stats:
        own, head = self._own.figures(), self._ends.streamed
        figures = replace(
            own,
            streamed_bytes=own.streamed_bytes + head.read_bytes,
            disk_s=head.read_seconds if head.ring_bytes else own.disk_s,  # one clock: the head's knows of the blocks
            stall_s=own.stall_s + head.stall_seconds,
        )
        steady = self._own.steady() if verdict else None
        return totals(self._cluster.session, self._cluster.epoch, figures, steady)


def wire(asked: str | None, pack: Pack) -> str:
    """Format of partial sums on the network: what was asked for, f32 for f32 weights, else bf16.

    Raises:
        UsageError: if f32 weights are asked to travel in another format.
    """
    exact = pack.format == "f32"
    if asked not in (None, "f32") and exact:
        raise UsageError(f"f32 weights imply an f32 wire; drop --wire {asked}, or give another --dtype")
    return asked or ("f32" if exact else "bf16")


def _context(asked: int | None, longest: int) -> int:
    """Tokens of context for a model that was made for `longest`.

    Raises:
        UsageError: if more is asked for.
    """
    if asked is not None and asked > longest:
        raise UsageError(f"-c {asked} is over the {longest} tokens that this model was made for; give at most those")
    return asked or min(DEFAULT_CONTEXT, longest)


def kv_dtype(pack: Pack) -> KvDtype:
    """f32 for f32 weights, so that they compute exactly what the model says; else f16."""
    return "f32" if pack.format == "f32" else "f16"


def _missing(dropped: Mapping[str, int]) -> str:
    nodes = ", ".join(f"{count} of {node}" for node, count in dropped.items())
    return f"the trace lacks the last spans ({nodes}): a node has room for {TRACE_SPANS}; trace a shorter run"
