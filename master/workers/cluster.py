"""The workers of one run, together: connect, assign, step, watch, count, leave.

One thread uses a cluster. Meanwhile a `Keeper` takes in messages and serves weights; the next call raises its errors.
"""

import os
import secrets
import socket
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import replace

import zmq

from allreduce.deadline import Lateness
from master.workers.keeper import Keeper
from master.workers.links import APART_S, LinkBrokenError, LinkWatch, last_awaited
from master.workers.meeting import meeting, tell_apart
from master.workers.places import WorkerId, WorkerOrder
from master.workers.recruits import RETRY_S, Recruits
from master.workers.remote import RemoteWorker
from master.workers.weights import UnitSource
from scheduler.model.timeline import NO_OTHER_WAITS, OtherWaits
from tpi.errors import NodeError, NodeInUse, NodeLost, TpiError
from tpi.net.codec import encode
from tpi.net.fields import WindowState
from tpi.net.messages import Abort, Assign, Hello, PeerAddress, Ready, Step
from tpi.net.questions import AskDisk, AskLink, AskSpans, AskStats, Spans, Stats
from tpi.net.sockets import Net
from tpi.progress import Progress, silent
from tpi.system.clocks import Awake, since_boot
from tpi.system.interrupts import deferred
from tpi.text import plain
from tpi.trace import PAGE_SPANS
from worker.profile import memory_budget

CONNECT_S = 10.0
STALL_S = 120.0  # seconds without progress after which a worker that loads is lost
STATS_S = 10.0
_ROOM = 1.125  # a worker left out for lack of memory is tried again when it has this many times as much
_LINGER_MS = 200
_SLICE_MS = 50


class Cluster:
    """Connections to all workers; rank r is `workers[r - 1]`. A context manager: leaving it releases the workers."""

    def __init__(self, net: Net, workers: list[RemoteWorker], session: int, name: str) -> None:
        self.net = net
        self.workers = workers
        self.session = session
        self.epoch = 0
        self.name = name
        self.recruits = Recruits(self._call)
        self.places = WorkerOrder()
        self._watched: dict[int, int] = {}
        self.lateness = Lateness()  # tracks the rank for which the master itself waits in sums
        self._circles = LinkWatch()
        self._broken_off = False
        self._keeper = Keeper(self._take_in)

    @classmethod
    def connect(
        cls,
        addresses: Sequence[str],
        net: Net | None = None,
        timeout_s: float = CONNECT_S,
        without: Callable[[NodeError], None] | None = None,
    ) -> "Cluster":
        """Connect to the workers at `addresses` (`HOST:PORT`), all at once.

        If `without` is given, call it with the error of each worker that fails, and go on without the worker.

        Raises:
            NodeLost: if a worker does not answer within `timeout_s`; earlier if the system reports why.
            NodeRefused: if a worker is in use, of another version, or given twice.
        """
        net = net or Net()
        session, name = secrets.randbits(64), f"{plain(socket.gethostname(), 64)} (process {os.getpid()})"
        cluster = cls(net, [], session, name)
        try:
            cluster.places.known = [WorkerId(address) for address in addresses]
            for address in addresses:
                cluster.workers.append(cluster._call(address))
            cluster._meet(timeout_s, without)
            cluster._keeper.start()
        except BaseException:
            cluster.close()
            raise
        return cluster

    @property
    def hellos(self) -> list[Hello]:
        """The self-descriptions of the workers, rank 1 first."""
        return [worker.hello for worker in self.workers if worker.hello]

    @property
    def weights_sent(self) -> int:
        """Bytes of weights that the workers received for the current plan."""
        return sum(worker.ready.fetched_bytes for worker in self.workers if worker.ready)

    def peers(self, master: str = "master", address: str = "") -> tuple[PeerAddress, ...]:
        """Return all nodes in rank order, as in `Assign.peers`; rank 0 is the master, with this name and address."""
        workers = [each.peer(rank) for rank, each in enumerate(self.workers, 1)]
        return (PeerAddress(0, master, address), *workers)

    def assign(self, plans: Sequence[Assign], source: UnitSource, progress: Progress = silent) -> list[Ready]:
        """Assign plans to the workers and wait until they are ready: `begin`, then `finish`."""
        self.begin(plans, source)
        return self.finish(progress)

    def begin(self, plans: Sequence[Assign], source: UnitSource) -> None:
        """Send every worker its plan (ranks 1 and up); `source` has the units that workers may lack.

        All plans carry this cluster's session and one epoch, higher than the last one. Workers load in the background;
        most of the units that they lack are sent in `finish`.

        Raises:
            NodeLost: if a worker is gone.
        """
        with self._keeper.lock:
            for worker, plan in zip(self.workers, plans, strict=True):
                self.epoch = plan.epoch
                worker.expect(plan.epoch)
                assert worker.feeder
                worker.feeder.begin(plan, source)
                worker.send(plan)

    def finish(self, progress: Progress = silent) -> list[Ready]:
        """Serve weights until all workers are ready; return their answers. `progress` counts bytes of weights.

        Raises:
            NodeError: if a worker fails, is lost, or makes no progress for two minutes.
        """
        self._need()
        for each in self.workers:
            each.heartbeats.advanced = since_boot()
        while not all(worker.ready for worker in self.workers):
            self._pump(_SLICE_MS)
            self._check_stalls(STALL_S)
            feeds = [worker.feeder.stats for worker in self.workers if worker.feeder]
            if any(feed.missing for feed in feeds):
                progress(sum(feed.sent for feed in feeds), sum(feed.missing for feed in feeds))
        return [worker.ready for worker in self.workers if worker.ready]

    def step(self, step: Step, first: Container[int] | None = None) -> None:
        """Start a step on every worker. Only the ranks in `first` (None: all) get its hidden states.

        Raises:
            NodeError: if a worker is lost, or has failed since the last call.
        """
        self.check()
        if not self.workers:
            return  # a cluster without workers
        with self._keeper.lock:
            self._need()
            self.poll()
            whole, bare = encode(step), encode(replace(step, x=step.x[:0]))
            with deferred():  # signals are handled once afterwards, not after every worker
                for rank, worker in enumerate(self.workers, 1):
                    worker.send_frames(whole if first is None or rank in first else bare)

    def poll(self) -> None:
        """Process the messages that have arrived, without waiting.

        Raises:
            NodeError: naming the worker that failed, was stopped, or is lost.
        """
        self.check()
        with self._keeper.lock:
            if self._keeper.problem:
                raise self._keeper.problem
            self._take_in()
            now = since_boot()
            for worker in self.workers:
                worker.judge(now)
            self._circles.judge(self.workers, self.lateness.rank(now), now)

    def break_off(self) -> None:
        """Make every wait for workers, and every question to workers, fail from now on. For any thread."""
        self._broken_off = True

    def check(self) -> None:
        """Raise TpiError if `break_off` was called."""
        if self._broken_off:
            raise TpiError("the run ends early")

    def watch(self, rank: int) -> bool:
        """Return True if the worker of `rank` has made progress since the last call (for `Endpoints.watch`).

        Raises:
            NodeError: if any worker failed, was stopped, or is lost.
        """
        self.poll()
        if not 1 <= rank <= len(self.workers):
            return False
        progress, self._watched[rank] = self._watched.get(rank), self.workers[rank - 1].heartbeats.progress
        return progress is not None and progress != self._watched[rank]

    def awaited(self, rank: int) -> int:
        """Return the rank for which the worker of `rank` waits, or `rank` if it waits for none (for `Endpoints`)."""
        return last_awaited(rank, [worker.heartbeats.missed for worker in self.workers])

    def stats(self, waits: Sequence[OtherWaits] = ()) -> list[Stats]:
        """Return the totals of every worker, rank 1 first.

        With `waits`, the times that each worker waits for other disks, they include `steady`, which takes longer.

        Raises:
            NodeError: if a worker is lost, or does not answer.
        """
        each = waits or [NO_OTHER_WAITS] * len(self.workers)
        for worker, waited in zip(self.workers, each, strict=True):
            self.ask(AskStats(self.session, self.epoch, bool(waits), waited.tail, waited.others), worker)
        self.wait(lambda: all(worker.stats for worker in self.workers), STATS_S, self._no_stats)
        return [worker.stats for worker in self.workers if worker.stats]

    def windows(self) -> list[WindowState]:
        """Return the state of each worker's memory window at its last heartbeat, rank 1 first. For any thread."""
        return [worker.heartbeats.window for worker in self.workers]

    def spans(self, worker: RemoteWorker, first: int = 0, count: int = PAGE_SPANS) -> Spans:
        """Return a worker's clock, and at most `count` of its spans from number `first` on; errors as for `stats`."""
        self.ask(AskSpans(self.session, self.epoch, first, count), worker)
        self.wait(lambda: worker.spans is not None, STATS_S, lambda: worker.lost("it does not answer with its spans"))
        assert worker.spans
        return worker.spans

    def abort(self) -> None:
        """Abort the current plan on all workers that are not lost. The workers then wait for the next plan."""
        for worker in self.workers:
            with self._keeper.lock, suppress(NodeError):
                worker.send(Abort(self.session, self.epoch))

    def part(self, error: NodeError) -> list[RemoteWorker]:
        """Drop the worker that `error` names, and all others that are lost; return the dropped workers.

        The remaining workers abort their plan. Workers that were lost and did not fail are called again in the
        background.
        """
        with self._keeper.lock:
            self._take_in()
            now = since_boot()
            gone = [one for one in self.workers if one.name == error.node or one.gone(now)]
            self.workers = [one for one in self.workers if one not in gone]
            self.abort()
            self.epoch += 1
            for worker in self.workers:
                worker.expect(self.epoch)
            for worker in gone:
                worker.close(0)
                if isinstance(error, NodeLost) or worker.name != error.node:
                    apart = isinstance(error, LinkBrokenError) and worker.name == error.node
                    self.recruits.seek(worker.address, now + APART_S if apart else 0.0, key=worker.key)
            self._watched.clear()
        return gone

    def join(self) -> list[RemoteWorker]:
        """Add the ready workers that were called in the background, and return them, still without plans."""
        with self._keeper.lock:
            self.recruits.tend(since_boot())
            taken = self.recruits.take()
            self.workers = self.places.ordered([*self.workers, *taken])
            tell_apart(self.workers)
            self._watched.clear()
        return taken

    def dismiss(self, workers: Sequence[RemoteWorker]) -> None:
        """Disconnect some workers for good."""
        with self._keeper.lock:
            self.workers = [one for one in self.workers if one not in workers]
            for worker in workers:
                worker.close(_LINGER_MS)
            self._watched.clear()

    def postpone(self, workers: Sequence[RemoteWorker], full: Sequence[RemoteWorker]) -> None:
        """Disconnect workers and call them again later; those in `full` may join only with clearly more memory."""
        self.dismiss(workers)
        with self._keeper.lock:
            for worker in workers:
                enough = _ROOM * memory_budget(worker.hello.profile) if worker in full and worker.hello else 0
                self.recruits.seek(worker.address, since_boot() + RETRY_S, above=int(enough), key=worker.key)

    def seek(self, address: str, key: bytes = b"") -> None:
        """Call the worker at `address` in the background; with a `key`, only its owner. For any thread."""
        with self._keeper.lock:
            self.recruits.seek(address, key=key)

    def try_announced(self, address: str, key: bytes) -> None:
        """Call the owner of `key` at `address`, unless it is connected already. May be called from any thread."""
        with self._keeper.lock:
            if self.recruits.misses(key) or all(worker.key != key for worker in self.workers):
                self.recruits.try_announced(address, key)

    def await_recruits(self, seconds: float) -> bool:
        """Wait up to `seconds` for a worker that may join; return True if there is one.

        Raises:
            TpiError: if `break_off` was called.
        """
        awake = Awake()
        while not self.recruits.ready and awake() < seconds:
            self.check()
            with self._keeper.lock:
                self._listen(_SLICE_MS)
                self._take_in()
        return bool(self.recruits.ready)

    def close(self) -> None:
        """Disconnect all workers, which become idle and keep their shards on disk."""
        self._keeper.stop()
        self.recruits.close()
        for worker in self.workers:
            worker.close(_LINGER_MS)
        self.workers = []
        self.net.close()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _call(self, address: str, key: bytes = b"") -> RemoteWorker:
        called = {*self.recruits.addresses, *(worker.address for worker in self.workers)}
        return RemoteWorker(self.net, address, self.session, self.places.link(address, called), self.name, key)

    def _need(self) -> None:
        """Start the heartbeat timeout of every worker, because their answers are needed from now on."""
        now = since_boot()
        for worker in self.workers:
            worker.heartbeats.ask(now)

    def _take_in(self) -> bool:
        """Process the messages that have arrived, and store errors; return True while a round trip is measured."""
        for worker in self.workers:
            worker.serve()
        now = since_boot()
        self.recruits.tend(now)
        return any(worker.heartbeats.link.awaited(now) for worker in (*self.workers, *self.recruits.called))

    def ask(self, question: AskDisk | AskLink | AskStats | AskSpans, *workers: RemoteWorker) -> None:
        """Send a question to `workers`; first forget their answers to earlier questions of all kinds."""
        with self._keeper.lock:
            self._need()
            for worker in workers:
                worker.stats = worker.spans = worker.link = worker.disk = None
                worker.send(question)

    def _pump(self, milliseconds: int) -> None:
        with self._keeper.lock:
            self._listen(milliseconds)
            self.poll()

    def _listen(self, milliseconds: int) -> None:
        poller = zmq.Poller()
        for one in (*(each for worker in self.workers for each in worker.sockets), *self.recruits.sockets):
            poller.register(one, zmq.POLLIN)
        poller.poll(milliseconds)

    def wait(self, done: Callable[[], bool], seconds: float, late: Callable[[], TpiError]) -> None:
        """Wait until `done()` is True. After `seconds`, raise the error of `late`; NodeError if a worker is lost."""
        awake = Awake()  # does not count pauses of this process
        while not done():
            if awake() > seconds:
                raise late()
            self._pump(_SLICE_MS)

    def _check_stalls(self, seconds: float) -> None:
        for worker in self.workers:
            if not worker.ready and since_boot() - worker.heartbeats.advanced > seconds:
                raise worker.lost(f"it has made no progress for {seconds:.0f} s while loading its shard")

    def _meet(self, seconds: float, without: Callable[[NodeError], None] | None) -> None:
        """Wait until all workers have answered, except the workers whose errors `without` accepts."""
        awake = Awake()
        while (error := self._not_met(awake, seconds)) is not None:
            gone = [one for one in self.workers if error.node in (one.name, one.address)]
            if without is None or not gone:
                raise error
            without(error)
            self.dismiss(gone)
            for worker in gone if isinstance(error, NodeLost | NodeInUse) else ():
                self.recruits.seek(worker.address, key=worker.key)
        self.workers = self.places.ordered(self.workers)
        tell_apart(self.workers)

    def _not_met(self, awake: Awake, seconds: float) -> NodeError | None:
        """Wait until all workers have answered; return the error of the first worker that does not, or None."""
        with meeting(self.workers) as first_words:
            try:
                self.wait(lambda: first_words.met(awake()), seconds, first_words.no_answer)
            except NodeError as error:
                return error
        return None

    def _no_stats(self) -> NodeLost:
        return next(one for one in self.workers if not one.stats).lost("it does not answer with its figures")
