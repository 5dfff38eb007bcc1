"""The compute thread of a worker: it loads shards and runs steps, one job after the other.

It never touches the control socket: it sends messages through `post`. Errors become a `Failure` message for the master.
Each job belongs to a plan. When the I/O thread sets another `plan`, a job of an earlier plan ends at its next check.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from threading import Thread

from allreduce.base import Endpoints
from allreduce.deadline import Lateness
from allreduce.stages import most_in_flight
from scheduler.model.sizes import STAGE_CHUNK
from scheduler.model.timeline import OtherWaits
from scheduler.window.stats import WindowPosition
from tpi.errors import NodeError, PlanError, TpiError
from tpi.net.fields import Phase
from tpi.net.messages import (
    Abort,
    Assign,
    Failure,
    Ready,
    Step,
)
from tpi.net.questions import AskDisk, AskLink, AskStats, MeasuredDisk, Stats
from tpi.net.transfers import Missing
from tpi.system.clocks import since_boot
from tpi.system.machine import return_memory
from tpi.text import SENTENCE_CHARACTERS, plain
from tpi.trace import OFF, NoTrace
from worker.node_plan import node_blocks
from worker.plan.checks import check_step
from worker.profile import reset_peak
from worker.service.served import Build, Figures, ServedNode, totals
from worker.shards.cache import ShardCache
from worker.shards.fetch import Fetcher
from worker.shards.image import HeldBlock
from worker.shards.partial_image import PartialImage

Plan = tuple[int, int]  # session and epoch
Job = Assign | Step | AskLink | AskDisk | AskStats | Abort | None
Post = Callable[[object], None]

Check = Callable[[Assign], None]  # raises an error if a plan is invalid

IDLE: Plan = (0, 0)
_F32_BYTES = 4
_MOST_JOBS = 64  # limit of the queue; a well-behaved master has one step under way
_MOST_STEPS = 2  # limit of queued tokens, in steps of the greatest length: the node's budget covers their memory
log = logging.getLogger(__name__)


class CancelledError(TpiError):
    """An error that ends a job whose plan is no longer current."""


class Compute:
    """The compute thread, its queue of jobs, and its node. The I/O thread reads the public attributes."""

    def __init__(
        self, cache: ShardCache, fetcher: Fetcher, endpoints: Endpoints, build: Build, post: Post, check: Check
    ) -> None:
        """Create the thread; `start` starts it.

        Args:
            cache: the shards of this worker.
            fetcher: asks the master for missing units.
            endpoints: sockets for the collective; `endpoints.watch` is replaced.
            build: builds the node of a plan.
            post: sends a message to the master.
            check: called with each new plan; raises if it is invalid.
        """
        self.plan = IDLE  # set by the I/O thread
        self.master = b""  # the master's identity on the weights plane, set before its first plan
        self.phase: Phase = "idle"
        self.step = 0
        self.broken = ""  # the reason if the thread ended because of an error
        self.dropped: Callable[[], int] = int  # returns the I/O thread's count of dropped messages
        self._cache = cache
        self._fetcher = fetcher
        self._endpoints = replace(endpoints, watch=self._keep_waiting)
        self._lateness = Lateness()
        self._build, self._check_plan = build, check
        self._post = post
        # of the running plan: values of a hidden state, tokens of the longest step, values of all layers' embeddings
        self._hidden = self._longest = self._per_layer = 0
        self._others = 0  # number of other nodes in the running plan
        self._at_once = 1  # the most steps in flight in the running plan
        self._first = True  # whether this node is in the first stage of the running plan
        self._queued = self._taken = 0  # tokens of all steps that the I/O thread queued; that the compute thread took
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        self._node: ServedNode | None = None
        self._running = IDLE
        self._ready: Plan | None = None
        self._ticks = 0
        self._done = 0
        self._thread = Thread(target=self._main, name="compute", daemon=True)

    @property
    def progress(self) -> int:
        """A count that grows while the thread loads or computes. A constant count shows that it hangs."""
        node = self._node
        return self._ticks + (node.progress if node else 0)

    @property
    def position(self) -> WindowPosition:
        """The memory window's place in the cycle of streamed blocks; may be read while a step runs."""
        node = self._node
        return node.position if node else WindowPosition()

    @property
    def missed(self) -> int:
        """1 + the rank of the node whose message is late in a sum; 0 if no message is late."""
        return 1 + self._lateness.rank(since_boot())

    @property
    def trace(self) -> NoTrace:
        """The spans of the running plan; may be read while a step runs."""
        node = self._node
        return node.trace if node else OFF

    def start(self) -> None:
        """Start the compute thread."""
        self._thread.start()

    def put(self, job: Job) -> None:
        """Queue a job; None ends the thread. Before an Assign or an Abort, remove all queued jobs.

        Raises:
            PlanError: if a step does not fit the plan, or if too many jobs are queued.
        """
        if isinstance(job, Step):
            if self._ready != (job.session, job.epoch):
                return  # the plan failed, and the master was told so
            check_step(job, self._hidden, self._longest, self._first, self._per_layer)
        if isinstance(job, Assign | Abort):
            self._clear()
        elif job is not None:
            self._require_room(_tokens(job))
        self._queued += _tokens(job)
        self._jobs.put(job)

    def _clear(self) -> None:
        with suppress(Empty):
            while True:
                self._queued -= _tokens(self._jobs.get_nowait())

    def _require_room(self, tokens: int) -> None:
        waiting = self._queued - self._taken
        most = max(_MOST_STEPS * self._longest, self._at_once * STAGE_CHUNK)
        if self._jobs.qsize() >= _MOST_JOBS or (waiting and waiting + tokens > most):
            raise PlanError(
                f"the master sends steps faster than this node computes: {waiting} tokens are queued; "
                "start the master again"
            )

    def stop(self, seconds: float) -> bool:
        """End the thread; return True if it ended within `seconds`."""
        self.plan = IDLE
        self.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _main(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            log.critical("the compute thread ended", exc_info=True)
            reason = f"its compute thread ended ({type(error).__name__}: {error})"
            self._post(Failure(*self._running, "", plain(reason, SENTENCE_CHARACTERS)))
            self.broken = reason  # the I/O thread ends when it sees this

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._running = (job.session, job.epoch)
            self._taken += _tokens(job)
            try:
                self._do(job)
            except CancelledError:
                self._close_node()
            except NodeError as error:
                self._fail(str(error), error.node)
            except MemoryError:
                self._fail("out of memory; give it a smaller share with --split, or choose a smaller context with -c")
            except TpiError as error:
                self._fail(str(error))
            except OSError as error:
                self._fail(f"cannot use {error.filename or 'a file'}: {error.strerror or error}")
            except Exception as error:
                log.exception("the compute thread failed")
                self._fail(f"{type(error).__name__}: {error}")
            self.phase = "idle"
        self._close_node()

    def _do(self, job: Assign | Step | AskLink | AskDisk | AskStats | Abort) -> None:
        if isinstance(job, Abort):
            self._close_node()
            return
        self._check()
        if isinstance(job, Assign):
            self._load_plan(job)
        elif isinstance(job, AskStats):
            self._post(self._stats(job))
        elif isinstance(job, AskLink):
            self._measure_link(job)
        elif isinstance(job, AskDisk):
            self._measure_disk(job)
        else:
            self._run(job)

    def _load_plan(self, assign: Assign) -> None:
        """Load the units of a new plan, fetch missing ones from the master, and build the node."""
        self._close_node()
        reset_peak()
        self.phase = "load"
        self._check_plan(assign)
        blocks, fetched = self._blocks(assign)
        self._check()
        self._lateness = Lateness()
        endpoints = replace(self._endpoints, lateness=self._lateness)
        self._node = node = self._build(assign, blocks, endpoints, lambda done, total: self._check(done))
        self._hidden, self._longest = assign.config.hidden, node.prefill_tokens
        self._per_layer = assign.config.per_layer_values
        self._others = assign.size - 1
        self._at_once = most_in_flight([stage.ranks for stage in assign.stages])
        self._first = assign.rank in assign.stages[0].ranks
        self._ready = self._running
        figures = node.figures()
        sizes = (figures.weight_bytes, figures.resident_bytes, fetched)
        self._post(Ready(*self._running, node.pages, node.prefill_tokens, *sizes))

    def _blocks(self, assign: Assign) -> tuple[Sequence[HeldBlock], int]:
        stored = node_blocks(assign)
        found = self._cache.open(stored, lambda done, total: self._check(done), _title(assign))
        partials = [partial for partial in found.values() if isinstance(partial, PartialImage)]

        def finish(partial: PartialImage) -> None:
            found[partial.block.id] = self._cache.finish(partial)

        for partial in partials:
            if not partial.missing:
                finish(partial)
        lacking = [partial for partial in partials if partial.missing]
        fetched = self._fetch(lacking, finish) if lacking else 0
        self._cache.prune(stored)
        return [held for block in stored if isinstance(held := found[block.id], HeldBlock)], fetched

    def _fetch(self, partials: Sequence[PartialImage], finish: Callable[[PartialImage], None]) -> int:
        units = sum(len(partial.missing) for partial in partials)
        nbytes = sum(partial.missing_bytes for partial in partials)
        missing = Missing(*self._running, units, nbytes)
        return self._fetcher.fetch(self.master, missing, partials, finish, self._check)

    def _run(self, step: Step) -> None:
        if self._node is None or self._ready != self._running:
            return  # the plan failed, and the master was told so
        self.phase, self.step = "compute", step.step
        tokens = step.tokens or self._longest  # a step without tokens measures the links
        self._lateness.expect(tokens * self._hidden * _F32_BYTES * self._others)
        self._node.run(step)

    def _measure_link(self, asked: AskLink) -> None:
        from worker.measure.link import measure_pair  # imports more than a bare worker needs

        self._post(measure_pair(asked, replace(self._endpoints, watch=self._until_over)))

    def _measure_disk(self, asked: AskDisk) -> None:
        from worker.measure.disk import own_disk  # imports more than a bare worker needs

        self._post(MeasuredDisk(asked.session, asked.epoch, own_disk(self._cache.root.parent)))

    def _stats(self, asked: AskStats) -> Stats:
        node = self._node
        if node is None:
            return totals(*self._running, Figures(), None, self.dropped())
        steady = node.steady(OtherWaits(tail=asked.tail, others=asked.others)) if asked.with_steady else None
        return totals(*self._running, node.figures(), steady, self.dropped())

    def _check(self, done: int = 0) -> None:
        """Raise CancelledError if the job's plan is no longer current.

        `done` is the number of blocks or bytes loaded so far; if it has changed, `progress` grows.
        """
        if done != self._done:
            self._done = done
            self._ticks += 1
        if self.plan != self._running:
            raise CancelledError("the plan is over")

    def _keep_waiting(self, rank: int) -> bool:
        """Return True, so that the node keeps waiting for the peer `rank`: only the master decides that a node is lost.

        Raises:
            CancelledError: if the master has ended the plan.
        """
        if self.plan != self._running:
            raise CancelledError("the plan is over")
        return True

    def _until_over(self, rank: int) -> bool:
        """Return False, so that a wait for the peer `rank` ends at its deadline.

        Raises:
            CancelledError: if the master has ended the plan.
        """
        self._check()
        return False

    def _fail(self, message: str, node: str = "") -> None:
        plan = self._running
        self._close_node()
        self._post(Failure(*plan, plain(node), plain(message, SENTENCE_CHARACTERS) or "unknown failure"))

    def _close_node(self) -> None:
        node, self._node, self._ready = self._node, None, None
        if node is not None:
            self._ticks += node.progress
            self._close_or_log(node.close)
            del node
            return_memory()
        self._close_or_log(self._cache.release)
        self._close_or_log(lambda: self._fetcher.tidy(self.master))

    @staticmethod
    def _close_or_log(close: Callable[[], None]) -> None:
        """Call `close`; log its errors instead of raising them, because the next plan opens its own resources."""
        try:
            close()
        except Exception:
            log.exception("cannot close a resource of the last plan")


def _title(assign: Assign) -> str:
    """Return a description of the plan's model for `tpi ls`, since a worker does not get the model's name."""
    config = assign.config
    return f"{config.family}-{config.layers}x{config.hidden}"


def _tokens(job: Job) -> int:
    return job.tokens if isinstance(job, Step) else 0
