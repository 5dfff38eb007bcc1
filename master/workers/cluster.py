"""The workers of one run, together: connect, assign, step, watch, count, leave.

One thread uses it. While that thread does something else, a `master.workers.keeper.Keeper` takes in what the workers
send and serves them weights; what it finds wrong waits for the next call.
"""

import os
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

import zmq

from master.deployment.weights import UnitSource
from master.workers.keeper import Keeper
from master.workers.reach import ReachProbe, listen_example
from master.workers.remote import Remote
from tpi.errors import NodeError, NodeLost, TpiError
from tpi.net.codec import encode
from tpi.net.messages import Abort, AskSpans, AskStats, Assign, Hello, PeerAddress, Ready, Spans, Stats, Step
from tpi.net.sockets import Net, split_address
from tpi.progress import Progress, silent
from tpi.system.clocks import Awake, since_boot
from tpi.system.interrupts import deferred
from tpi.text import NAME_CHARACTERS, plain
from tpi.trace import PAGE_SPANS, clock

CONNECT_S = 5.0
_PROBE_AFTER_S = 0.3  # without a connection
STALL_S = 120.0  # in which a worker that loads gets nothing done
STATS_S = 10.0
_LINGER_MS = 200
_SLICE_MS = 50


class Cluster:
    """Connections to all workers; rank r is `remotes[r - 1]`. A context manager: leaving it frees the workers."""

    def __init__(self, net: Net, remotes: list[Remote], session: int, name: str) -> None:
        self.net = net
        self.remotes = remotes
        self.session = session
        self.epoch = 0
        self.name = name
        self._watched: dict[int, int] = {}
        self._keeper = Keeper(self._take_in)

    @classmethod
    def connect(cls, addresses: Sequence[str], net: Net | None = None, timeout_s: float = CONNECT_S) -> "Cluster":
        """Meet the workers at `addresses` (`HOST:PORT`), all at once.

        Raises:
            NodeLost: if one does not answer within `timeout_s`; sooner, and why, where the system says so.
            NodeRefused: if one is in use, of another version, or given twice.
        """
        net = net or Net()
        session, name = secrets.randbits(64), f"{plain(socket.gethostname(), 64)} (process {os.getpid()})"
        cluster = cls(net, [], session, name)
        try:
            for link, address in enumerate(addresses):
                cluster.remotes.append(Remote(net, address, session, link, name))
            cluster._meet(timeout_s)
            cluster._tell_apart()
            cluster._keeper.start()
        except BaseException:
            cluster.close()
            raise
        return cluster

    @property
    def hellos(self) -> list[Hello]:
        """What every worker said of itself, rank 1 first."""
        return [remote.hello for remote in self.remotes if remote.hello]

    def peers(self, master: str = "master", address: str = "") -> tuple[PeerAddress, ...]:
        """All members in rank order, for `Assign.peers` and the collective; rank 0 is the master, under that name."""
        workers = [PeerAddress(rank, r.name, r.collective_address) for rank, r in enumerate(self.remotes, 1)]
        return (PeerAddress(0, master, address), *workers)

    def assign(self, plans: Sequence[Assign], source: UnitSource, progress: Progress = silent) -> list[Ready]:
        """`begin`, then `finish`."""
        self.begin(plans, source)
        return self.finish(progress)

    def begin(self, plans: Sequence[Assign], source: UnitSource) -> None:
        """Give every worker its plan (ranks 1 and up); `source` has the units that it may lack.

        All plans carry this cluster's session and one epoch, higher than the last. The workers load while the caller
        does something else; most of what they lack is sent in `finish`.

        Raises:
            NodeLost: if a worker is gone.
        """
        with self._keeper.lock:
            for remote, plan in zip(self.remotes, plans, strict=True):
                self.epoch = plan.epoch
                remote.expect(plan.epoch)
                assert remote.feeder
                remote.feeder.begin(plan, source)
                remote.send(plan)

    def finish(self, progress: Progress = silent) -> list[Ready]:
        """Serve weights until all workers are ready. `progress` counts bytes of weights.

        Raises:
            NodeError: if a worker fails, is lost, or gets nothing done for two minutes.
        """
        self._need()
        for remote in self.remotes:
            remote.heartbeats.advanced = since_boot()
        while not all(remote.ready for remote in self.remotes):
            self._pump(_SLICE_MS)
            self._check_stalls(STALL_S)
            feeds = [remote.feeder.stats for remote in self.remotes if remote.feeder]
            if any(feed.missing for feed in feeds):
                progress(sum(feed.sent for feed in feeds), sum(feed.missing for feed in feeds))
        return [remote.ready for remote in self.remotes if remote.ready]

    def step(self, step: Step) -> None:
        """Start a step on every worker.

        Raises:
            NodeError: if a worker is lost, or failed since the last look.
        """
        if not self.remotes:
            return  # nobody to write to
        with self._keeper.lock:
            self._need()
            self.poll()
            frames = encode(step)
            with deferred():  # once, and not for every worker
                for remote in self.remotes:
                    remote.send_frames(frames)

    def poll(self) -> None:
        """Take in what has arrived; returns at once.

        Raises:
            NodeError: naming the worker that failed, was stopped, or is lost.
        """
        with self._keeper.lock:
            if self._keeper.problem:
                raise self._keeper.problem
            self._take_in()
            now = since_boot()
            for remote in self.remotes:
                remote.judge(now)

    def watch(self, rank: int) -> bool:
        """For `allreduce.base.Endpoints.watch`: whether the worker of `rank` got anything done since the last call.

        Raises:
            NodeError: as `poll`, for any worker.
        """
        self.poll()
        if not 1 <= rank <= len(self.remotes):
            return False
        progress, self._watched[rank] = self._watched.get(rank), self.remotes[rank - 1].heartbeats.progress
        return progress is not None and progress != self._watched[rank]

    def stats(self, with_steady: bool = False) -> list[Stats]:
        """Every worker's totals, rank 1 first; with `with_steady` their `steady` too, which takes longer.

        Raises:
            NodeError: if a worker is lost, or does not answer.
        """
        self._ask(AskStats(self.session, self.epoch, with_steady), *self.remotes)
        self._wait(lambda: all(remote.stats for remote in self.remotes), STATS_S, self._no_stats)
        return [remote.stats for remote in self.remotes if remote.stats]

    def spans(self, remote: Remote, first: int = 0, count: int = PAGE_SPANS) -> Spans:
        """A worker's clock, and at most `count` of its spans from number `first` on. Errors as `stats`."""
        self._ask(AskSpans(self.session, self.epoch, first, count), remote)
        self._wait(lambda: remote.spans is not None, STATS_S, lambda: remote.lost("it does not answer with its spans"))
        assert remote.spans
        return remote.spans

    def read_clock(self, remote: Remote) -> tuple[int, int, int]:
        """Our clock when asking, a worker's clock, and ours when it had answered: `tpi.trace.clock` nanoseconds."""
        asked = clock()
        theirs = self.spans(remote, count=0).clock
        return asked, theirs, clock()

    def abort(self) -> None:
        """Give up the current plan; the workers that still live wait for the next one."""
        for remote in self.remotes:
            with self._keeper.lock, suppress(NodeError):
                remote.send(Abort(self.session, self.epoch))

    def close(self) -> None:
        """Leave: the workers become idle, and keep their shards."""
        self._keeper.stop()
        for remote in self.remotes:
            remote.close(_LINGER_MS)
        self.remotes = []
        self.net.close()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _need(self) -> None:
        """From now on the workers' silence counts."""
        now = since_boot()
        for remote in self.remotes:
            remote.heartbeats.ask(now)

    def _take_in(self) -> None:
        """Errors wait in the remotes."""
        for remote in self.remotes:
            remote.serve()

    def _ask(self, question: AskStats | AskSpans, *remotes: Remote) -> None:
        with self._keeper.lock:
            self._need()
            for remote in remotes:
                remote.stats = remote.spans = None
                remote.send(question)

    def _pump(self, milliseconds: int) -> None:
        """Wait for anything to arrive, then take it in."""
        with self._keeper.lock:
            poller = zmq.Poller()
            for remote in self.remotes:
                for one in remote.sockets:
                    poller.register(one, zmq.POLLIN)
            poller.poll(milliseconds)
            self.poll()

    def _wait(self, done: Callable[[], bool], seconds: float, late: Callable[[], TpiError]) -> None:
        awake = Awake()  # a pause of this process is nobody's fault
        while not done():
            if awake() > seconds:
                raise late()
            self._pump(_SLICE_MS)

    def _check_stalls(self, seconds: float) -> None:
        for remote in self.remotes:
            if not remote.ready and since_boot() - remote.heartbeats.advanced > seconds:
                raise remote.lost(f"it has got nothing done for {seconds:.0f} s while loading its shard")

    def _meet(self, seconds: float) -> None:
        """Wait until all workers have answered, and ask what is in the way of those to whom there is no connection."""
        probes: dict[str, ReachProbe] = {}
        awake = Awake()

        def met() -> bool:
            for remote in self.remotes if awake() > _PROBE_AFTER_S else ():
                if not remote.connected and remote.address not in probes:
                    probes[remote.address] = ReachProbe(*split_address(remote.address))
            for address, probe in probes.items():
                if probe.found:
                    raise NodeLost(address, probe.found)
            return all(remote.hello for remote in self.remotes)

        try:
            self._wait(met, seconds, self._nobody)
        finally:
            for probe in probes.values():
                probe.close()

    def _nobody(self) -> NodeLost:
        remote = next(remote for remote in self.remotes if not remote.hello)
        found = "something that is no tpi worker answers" if remote.connected else "no worker answers"
        return NodeLost(
            remote.address,
            f"{found} at {remote.address}; start one on that machine with: {listen_example(remote.address)} "
            "(without --listen it takes calls from its own machine only)",
        )

    def _no_stats(self) -> NodeLost:
        remote = next(remote for remote in self.remotes if not remote.stats)
        return remote.lost("it does not answer with its figures")

    def _tell_apart(self) -> None:
        """Give workers of equal names their addresses beside it."""
        counts = Counter(remote.name for remote in self.remotes)
        for remote in self.remotes:
            if counts[remote.name] > 1:
                beside = f" ({remote.address})"
                remote.name = remote.name[: NAME_CHARACTERS - len(beside)] + beside
