"""Recovery: after workers leave or join, deploy again over the present nodes and continue the requests.

Requests keep their tokens, whose keys and values are computed again on the nodes of the next deployment.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from master.deployment.planner import Split
from master.generation.thread import StillWanted
from master.joining.discoverythread import DiscoveryThread
from master.joining.probe import WorkerProbe
from master.joining.shares import Sharing
from master.workers.cluster import Cluster
from master.workers.remote import RemoteWorker
from tpi.errors import NodeError, NodeLost, PlanError, TpiError
from tpi.progress import phase
from tpi.system.clocks import Awake

_LOOK_S = 0.25  # longest time in seconds between two checks for returned workers and for requests that still wait


@dataclass
class Membership:
    """The members of a cluster, and the methods that handle a change of members.

    `deploy` makes a deployment from each node's share.
    """

    cluster: Cluster
    shares: Sharing
    deploy: Callable[[Sequence[float] | Split], None]
    warn: Callable[[str], None]
    patience_s: float  # seconds to wait for workers without which the model does not fit
    rebalance: bool  # True: use a worker that joins at once; False: from the next request on
    lookout: DiscoveryThread
    scout: WorkerProbe  # holds slow workers in reserve; they are used if the model does not fit without them
    standing: bool = True  # False after a failure, until the next deployment works
    _told: set[bytes] = field(default_factory=set)  # keys of workers that were reported as not used

    def begin(self, optional: bool) -> None:
        """Make the first deployment. If workers are `optional`, leave out any that fails or has too little memory.

        Raises:
            NodeError: if a needed worker fails, or needed workers in reserve do not come.
            PlanError: if the remaining nodes cannot hold the model.
        """
        awake = Awake()
        while (error := self._not_begun()) is not None:
            if isinstance(error, PlanError) and self.scout.kept:
                self._await(error, awake, _always)
            elif not optional or not self._left_out(error):
                raise error

    def recover(self, error: TpiError, wanted: StillWanted) -> bool:
        """Continue without a worker that is lost or failed; return False if `error` does not name one.

        Raises:
            TpiError: if the remaining nodes cannot hold the model, and no worker came back in time.
        """
        if not isinstance(error, NodeError) or not (gone := self.cluster.part(error)):
            return False
        self._say_goodbye(error, gone)
        self._redeploy(wanted)
        return True

    def renew(self, wanted: StillWanted) -> None:
        """Deploy again over the present nodes, because this node has changed.

        Raises:
            TpiError: if the nodes cannot hold the model, and no worker came in time.
        """
        self._redeploy(wanted)

    def welcome(self, fresh: bool, wanted: StillWanted) -> None:
        """Use the workers that have joined, if a request is about to begin (`fresh`) or `rebalance` is set.

        Called between two steps.
        """
        if not self.standing:
            self._redeploy(wanted)
        if not self.cluster.recruits.ready or not (fresh or self.rebalance):
            return
        new = self.cluster.join()
        if self.cluster.recruits.look_over is not None:
            self.shares.meet(self.cluster)
        if not (joined := self._useful(new)):
            return
        self._greet(joined)
        self.standing = False
        try:
            self._deploy_once()
            self.standing = True
            self._reconsider()
            return
        except PlanError as error:
            self.warn(f"{error}; going on without {_names(joined)}")
            self.cluster.postpone(joined, _named(error, joined) or joined)
        except NodeError as error:
            self._part(error)
        self._redeploy(wanted)

    def hear(self, address: str, key: bytes) -> None:
        """Connect to the owner of `key` at the announced `address`, unless it is in reserve.

        May be called from any thread.
        """
        if not self.scout.keeps(address, key):
            self.cluster.try_announced(address, key)

    def _redeploy(self, wanted: StillWanted) -> None:
        self.standing, awake = False, Awake()
        while not self._deployed(awake, wanted):
            pass
        self.standing = True
        self._reconsider()
        self.warn(f"planned anew; {self.cluster.weights_sent / 1e6:.1f} MB of weights were sent")

    def _deployed(self, awake: Awake, wanted: StillWanted) -> bool:
        """Try to deploy; return False if that failed and the members have changed."""
        try:
            self._deploy_once()
        except NodeError as error:
            self._part(error)
        except PlanError as error:
            self._await(error, awake, wanted)
        else:
            return True
        return False

    def _deploy_once(self) -> None:
        self.deploy(self.shares.among([worker.id for worker in self.cluster.workers]))

    def _not_begun(self) -> NodeError | PlanError | None:
        try:
            self._deploy_once()
        except (NodeError, PlanError) as error:
            return error
        return None

    def _left_out(self, error: NodeError | PlanError) -> bool:
        """Continue without the worker that `error` names, which may join later.

        Return False if `error` names no worker.
        """
        if isinstance(error, NodeError):
            self._part(error)
            return True
        gone = _named(error, self.cluster.workers)
        if gone:
            self.warn(f"{error}; going on without {_names(gone)}")
            self.cluster.postpone(gone, gone)
        return bool(gone)

    def _part(self, error: NodeError) -> None:
        if not (gone := self.cluster.part(error)):
            raise error
        self._say_goodbye(error, gone)

    def _await(self, error: PlanError, awake: Awake, wanted: StillWanted) -> None:
        """Wait for workers to join, because the present nodes have too little memory for the model."""
        self.warn(f"{error}. Waiting {self.patience_s:.10g} s for workers to come back; no tokens are lost")
        for one in self.scout.kept:
            self.scout.call(one)
        with self._unmeasured(), phase("waiting for workers to come back") as progress:
            while not self.cluster.recruits.ready:
                if (waited := awake()) > self.patience_s:
                    raise NodeLost("", f"no worker came back within {self.patience_s:.10g} s; without it, {error}")
                if not wanted():
                    raise NodeLost("", f"all requests have ended before a worker came back; without it, {error}")
                progress(int(waited), int(self.patience_s))
                self.cluster.await_recruits(_LOOK_S)
        self._greet(self.cluster.join())

    @contextmanager
    def _unmeasured(self) -> Iterator[None]:
        """Admit workers at once within the block, without measuring whether they are slow."""
        recruits = self.cluster.recruits
        look_over, recruits.look_over = recruits.look_over, None
        try:
            yield
        finally:
            recruits.look_over = look_over

    def _useful(self, joined: Sequence[RemoteWorker]) -> list[RemoteWorker]:
        """Return those of `joined` that do not slow the group.

        Disconnect the slow ones, and also present workers that slow the group since the new ones joined.
        """
        if self.cluster.recruits.look_over is None:
            return list(joined)
        everyone = self.cluster.workers
        refused = self.shares.refused([one.id for one in everyone])
        useful = [one for one in joined if one.id not in refused]
        for one in (slow := [one for one in (everyone if useful else joined) if one.id in refused]):
            self._refuse(one, refused[one.id])
        self.cluster.dismiss(slow)
        return useful

    def _refuse(self, worker: RemoteWorker, why: str) -> None:
        self.lookout.found([worker.key])
        self.scout.keep([worker.id])
        if worker.key not in self._told:  # report each worker once, because its measurements vary a little
            self._told.add(worker.key)
            self.warn(f"{worker.name} is not used: {why}")

    def _reconsider(self) -> None:
        """Let workers in reserve join if, by their measurements, they would not slow the present members."""
        if self.cluster.recruits.look_over is None:
            return
        present = [one.id for one in self.cluster.workers]
        for one in self.scout.kept:
            if one not in self.shares.refused([*present, one]):
                self.scout.call(one)

    def _say_goodbye(self, error: NodeError, gone: Sequence[RemoteWorker]) -> None:
        self.warn(self._parting(error, gone))
        self.lookout.miss(worker.key for worker in gone)

    def _parting(self, error: NodeError, gone: Sequence[RemoteWorker]) -> str:
        left = ", ".join(["master", *(worker.name for worker in self.cluster.workers)])
        others = [worker.name for worker in gone if worker.name != error.node]
        also = f" ({', '.join(others)} too)" if others else ""
        reason = str(error).partition("; check that it")[0]
        return f"{reason}{also}; going on with {left}"

    def _greet(self, joined: Sequence[RemoteWorker]) -> None:
        keys = {worker.key for worker in joined if worker.key}
        self.lookout.found(keys)
        self.scout.forget(keys)
        self._told -= keys
        if joined:
            self.warn(f"{_names(joined)} joined; planning anew")


def _always() -> bool:
    """Return True: the request for the first deployment is never cancelled."""
    return True


def _names(workers: Sequence[RemoteWorker]) -> str:
    return ", ".join(worker.name for worker in workers)


def _named(error: PlanError, workers: Sequence[RemoteWorker]) -> list[RemoteWorker]:
    """Return the worker that `error` names as too small for its plan, as a list; empty if it is not in `workers`."""
    return [worker for worker in workers if worker.name == error.node]
