"""One run of the master, from opening the model to releasing the workers; used by all commands."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from types import TracebackType
from typing import TYPE_CHECKING

from master.deployment.deploy import (
    MASTER,
    Deployer,
    master_memory,
    one_process_is_faster,
    own_limit,
    own_memory,
    own_threads,
)
from master.deployment.deployment import Deployment
from master.deployment.draft import NO_EFFECT, LoadedDraft, load_draft
from master.deployment.dtype import choose_dtype
from master.deployment.planner import Split, parse_split, refuse_too_many
from master.deployment.stages import AUTO, ONE
from master.generation.defaults import SamplingDefaults
from master.generation.engine import MOST_RUNNING, Engine
from master.generation.speculation.draftmodel import DraftModel
from master.generation.thread import EngineThread, StillWanted
from master.joining.discovery import find_workers, say_without, with_found
from master.joining.discoverythread import DiscoveryThread
from master.joining.measured import MeasuredWorkers
from master.joining.memory import house_memory
from master.joining.planned import first_split, neighbours_at, shares_later
from master.joining.probe import WorkerProbe
from master.joining.recovery import Membership
from master.joining.shares import Shares
from master.options import DEFAULT_CONTEXT, RunOptions
from master.reporting.figures import RunFigures
from master.reporting.report import NodeReport
from master.text.tokenizer import Tokenizer
from master.vocabulary.sampler import Sampler, Sampling
from master.workers.cluster import Cluster
from master.workers.local import LocalWorkers
from master.workers.places import WorkerId
from tpi.errors import NodeError, PlanError, TpiError, UsageError
from tpi.kernels.spec import PAGE_TOKENS
from tpi.keys.policy import KeyPolicy
from tpi.net.sockets import Net, Tap
from tpi.pack.library.locate import locate, open_located
from tpi.pack.reader import Pack
from tpi.progress import note, warn
from tpi.sparsity.files import NAME as PREDICTORS
from tpi.trace import clock
from worker.equipment import Equipment, measured, open_equipment
from worker.node.node import Node
from worker.profile import memory_budget, rss
from worker.shards.inventory import keep_within

if TYPE_CHECKING:
    from master.planning.home.compared import ComparedLayouts


_MANY = 1 << 30  # number of waiting requests that stands for no limit
_LEAST_CONTEXT = 128  # tokens; a shorter context is too short for a conversation


class Session:
    """One run of the master, a context manager: inside, the cluster is ready; at the end, the workers are released."""

    pack: Pack
    tokenizer: Tokenizer
    context: int  # tokens
    figures: RunFigures

    _deployer: Deployer
    _membership: Membership

    def __init__(self, placement: RunOptions, tap: Tap | None = None, equipment: Equipment | None = None) -> None:
        """Prepare a session; entering it opens everything.

        For tests: `tap` is called with every frame of the control and weights planes, and `equipment` replaces the real
        devices.
        """
        self.placement = placement
        self._equipment = equipment
        self._tap = tap
        self._stack = ExitStack()
        self._deployment: Deployment | None = None
        self._engine: Engine | None = None
        self._draft: LoadedDraft | None = None
        self._workers: list[WorkerId] = []  # of the current deployment

    def __enter__(self) -> "Session":
        with self._stack as stack:
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._judge_plan()
        self._stack.__exit__(kind, error, trace)

    @property
    def engine(self) -> Engine:
        """The engine of this session, which keeps its requests when the deployment is replaced."""
        assert self._engine is not None
        return self._engine

    @property
    def node(self) -> Node:
        """The master's own node in the current deployment."""
        assert self._deployment is not None
        return self._deployment.node

    @property
    def equipment(self) -> Equipment:
        """The devices of this process."""
        assert self._equipment is not None
        return self._equipment

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the nodes, rank 0 first."""
        return tuple(peer.name for peer in self._cluster.peers(MASTER))

    def deploy(self, shares: Sequence[float] | Split) -> None:
        """Replace the deployment by one with other shares, the master's first. Requests continue.

        Raises:
            PlanError: if a node cannot hold its part.
            NodeLost, NodeError: if a worker is lost or fails.
            WeightsError: if weights cannot be read or stored.

        After an error there is no deployment, so requests cannot continue.
        """
        self._judge_plan()
        self._close_deployment()
        bare, began = rss(), clock()  # measured before any node records
        self._deployment = deployment = self._deploy(shares)
        self.figures = RunFigures(self.pack, self._cluster, deployment, bare, began)
        if self._engine is None:
            most = max(MOST_RUNNING, self.placement.parallel, deployment.at_once.requests)
            self._engine = Engine(deployment, most, self._draft_model(deployment))
        else:
            self._engine.replace(deployment)
        self._workers = [worker.id for worker in self._cluster.workers]

    def _judge_plan(self) -> None:
        """Compare the measured time of a step in the current deployment with the plan's forecast."""
        if self._engine is not None and (seconds := self._engine.speculation.plain_step) is not None:
            self._membership.shares.judge(self._workers, seconds)

    def _deploy(self, shares: Sequence[float] | Split) -> Deployment:
        """Return a deployment; if it is the first one, shorten the context to what fits into free memory.

        Raises:
            PlanError: if a node cannot hold its part, or the context that fits is too short or shorter than the user's.
        """
        placement, first, asked = self.placement, self._engine is None, self.context
        automatic = not (placement.memory or placement.workers)
        while True:
            try:
                deployment = self._deployer.deploy(shares)
                break
            except PlanError as error:
                if not (automatic and first) or error.context is None:
                    raise
                shorter = _less_a_margin(error.context)
                if placement.context or shorter < _LEAST_CONTEXT:
                    raise PlanError(_too_little(placement, shorter), error.node) from error
                self.context = shorter
            self._deployer = replace(self._deployer, context=self.context)
        if self.context < asked:
            note(f"the context has {self.context} tokens, as many as fit into memory; give a larger -c to require more")
        return deployment

    def sampler(self, sampling: Sampling) -> Sampler:
        """Return a sampler for `sampling`, completed by the model's own settings, which are reported on stderr."""
        defaults = SamplingDefaults.of(self.tokenizer.info)
        for ignored in defaults.ignored:
            warn(ignored)
        if words := defaults.words(sampling):
            note(words)
        return Sampler(defaults.under(sampling))

    @contextmanager
    def answering(self, most_waiting: int = _MANY) -> Iterator[EngineThread]:
        """Run the engine on its own thread within the `with` block, and yield that thread.

        At most `most_waiting` requests wait. If the block raises, the running step or recovery is aborted.
        """
        thread = EngineThread(self.engine, most_waiting, self)
        thread.start()
        try:
            yield thread
        except BaseException:
            self.break_off()
            raise
        finally:
            thread.stop()

    def welcome(self, fresh: bool, wanted: StillWanted) -> None:
        """Take in workers that have joined; implements `master.generation.thread.Nodes`."""
        self._membership.welcome(fresh, wanted)

    def recover(self, error: TpiError, wanted: StillWanted) -> bool:
        """Recover from a failed step, without the lost worker or failed graphics chip; return False for other errors.

        Raises:
            TpiError: if the remaining nodes cannot hold the model, and no worker came back within `--patience`.
        """
        left = self.equipment.without_failed(error)
        if left is None:
            return self._membership.recover(error, wanted)
        self._equipment, self._deployer = left, replace(self._deployer, equipment=left)
        self._membership.renew(wanted)
        return True

    def compared(self) -> "ComparedLayouts | None":
        """Return the layouts that were compared, with the latest measurements; None if the user chose the layout."""
        return self._membership.shares.compared([worker.id for worker in self._cluster.workers])

    def break_off(self) -> None:
        """Abort all computing, loading and waiting, each with a TpiError. May be called from any thread."""
        self._cluster.break_off()
        self.node.loop.on_block = self._cluster.check

    def report(self) -> list[NodeReport]:
        """Return every node's figures. If a worker was lost after the answer, warn and return an empty list."""
        try:
            return self.figures.report()
        except NodeError as error:
            warn(f"there are no figures: {error}")
            return []

    def _open(self, stack: ExitStack) -> None:
        if self._equipment is None:
            self._equipment = open_equipment(self.placement.devices, partial(measured, cache=self.placement.cache))
            stack.callback(self._equipment.close)
        policy = KeyPolicy(locked=self.placement.keys)
        using: list[str] = []
        search = cache(partial(with_found, self.placement, policy, warn, using.append))
        located = locate(
            self.placement.model,
            self.placement.cache,
            house=lambda: house_memory(search().memory, search().workers, policy),
        )
        self.placement = placement = search()
        known = MeasuredWorkers(partial(neighbours_at, policy=policy))
        self.placement = placement = self._load_draft(stack, placement)
        planned = first_split(placement, known)
        if words := planned.words("".join(using)) if planned else "".join(using):
            warn(words)
        if planned is not None:
            self.placement = placement = replace(placement, workers=planned.addresses)
        shares = parse_split(placement.split, 1 + (placement.local or len(placement.workers)))
        if placement.stages in (AUTO, ONE) and planned is None:
            refuse_too_many(located, placement.dtype, placement.cache, shares)
        self.placement = placement = _with_local_memory(placement)
        addresses, found = self._addresses(stack), placement.discover and bool(placement.workers)
        net, without = Net(self._tap, policy), partial(say_without, warn) if found else None
        self._cluster = stack.enter_context(Cluster.connect(addresses, net, without=without))
        known.warn_of_failure()
        for address in placement.busy_workers:
            self._cluster.seek(address)
        asked = Shares.of(shares, self._cluster.places.known)
        workers = [worker.id for worker in self._cluster.workers]
        dtype = choose_dtype(placement.dtype, located, self._memories(), asked.among(workers))
        sharing = planned.sharing if planned else shares_later(asked, replace(placement, dtype=dtype), known)
        self.pack = open_located(located, dtype, placement.cache, room=self._make_room)
        if one_process_is_faster(placement, self.pack):
            note("one process alone would be faster: leave --local out, which is for trying several nodes")
        self.tokenizer = Tokenizer.load(self.pack)
        stack.callback(self.tokenizer.close)
        if self._draft is not None:
            self._draft.refuse_other_tokenizer(self.tokenizer, placement)
        self.tokenizer.start()
        self.context = _context(placement.context, self.pack.config.context)
        self._number(lambda: sharing.among(workers))
        self._deployer = Deployer(placement, self._cluster, self.pack, self.context, self._equipment, self._make_room)
        stack.callback(self._close_deployment)
        looking = placement.discover and placement.keys
        choosy = looking and not isinstance(sharing, Shares)  # the plan decides whether a found worker takes part
        lookout = DiscoveryThread(
            lambda: find_workers(policy), lambda address, key: self._membership.hear(address, key)
        )
        scout = WorkerProbe(known if choosy else None, lambda one: self._cluster.seek(one.address, one.key))
        for each in (lookout, scout):
            stack.callback(each.close)
        scout.keep(planned.left_out if planned else ())
        limits = (placement.patience, placement.rebalance)
        self._membership = Membership(self._cluster, sharing, self.deploy, warn, *limits, lookout, scout)
        self._membership.begin(optional=found)
        if choosy:
            self._cluster.recruits.look_over = scout.look_over
        if looking:
            lookout.welcome()

    def _load_draft(self, stack: ExitStack, placement: RunOptions) -> RunOptions:
        """Load the draft model, if the user named one; return `placement` with the draft model's memory."""
        if placement.draft is None:
            return placement
        if placement.scheduler and not placement.memory:
            placement = replace(placement, local_memory=own_memory(placement))
        self._draft = stack.enter_context(load_draft(placement, self.equipment.host, self._make_room))
        return replace(placement, draft_memory=self._draft.nbytes)

    def _draft_model(self, deployment: Deployment) -> DraftModel | None:
        """Return the draft model for the first deployment, or None if the user named none.

        Raises:
            UsageError: if steps cannot run drafted tokens.
        """
        if self._draft is None:
            return None
        if not deployment.drafts:
            raise UsageError(NO_EFFECT)
        return DraftModel(self._draft.deployment, self.pack.config.vocab)

    def _number(self, shares: Callable[[], Sequence[float] | Split]) -> None:
        """Switch to a pack renumbered for nodes with these `shares`, if only active neurons are computed."""
        if self.placement.sparsity != "off" and (self.pack.path / PREDICTORS).exists():
            from master.deployment.numbering import numbered_for

            self.pack = numbered_for(self.placement.sparsity, self.pack, shares(), self.placement.cache)

    def _addresses(self, stack: ExitStack) -> list[str]:
        placement = self.placement
        if not placement.local:
            return list(placement.workers)
        limits = (own_threads(placement), own_limit(placement))
        devices = placement.other_devices or [placement.devices] * placement.local
        workers = LocalWorkers([each.arguments for each in devices], placement.cache, *limits)
        return stack.enter_context(workers).addresses

    def _memories(self) -> list[int]:
        return [master_memory(self.placement), *(memory_budget(hello.profile) for hello in self._cluster.hellos)]

    def _make_room(self, nbytes: int = 0) -> None:
        """Make room in the cache for `nbytes` more, within its limit; ignore errors."""
        with suppress(OSError):
            keep_within(self.placement.cache, self.placement.cache_limit, nbytes)

    def _close_deployment(self) -> None:
        if self._deployment is not None:
            self._deployment.close()


def _with_local_memory(placement: RunOptions) -> RunOptions:
    """Return `placement` with the memory of each local node, if there are any.

    Raises:
        PlanError: if the user gave no memory limit, and no memory is free. Without this check, libraries would fail
        later.
    """
    if not placement.scheduler or placement.memory:
        return placement
    if not (free := own_memory(placement)):
        raise PlanError(_too_little(placement, 0))
    return replace(placement, local_memory=free) if placement.local else placement


def _less_a_margin(context: int) -> int:
    """Return seven eighths of `context` tokens, in whole pages, because a little less memory may be free later."""
    return context * 7 // 8 // PAGE_TOKENS * PAGE_TOKENS


def _too_little(placement: RunOptions, fitting: int) -> str:
    """Return a sentence that says why this machine's nodes cannot hold the model, and what to do.

    `fitting` is the number of tokens of context that would fit.
    """
    free, nodes = f"{own_memory(placement) >> 20}MiB", placement.local + 1
    found = f"{free} of memory are free for " + (f"each of the {nodes} nodes" if placement.local else "this run")
    ways = [f"give -c {fitting}"] if placement.context and fitting else []
    ways += ["leave --local out"] if placement.local else []
    ways += ["free memory (in a container, or with ulimit -v: raise the limit)"]
    wanted = f"a context of {placement.context} tokens" if ways[0].startswith("give") else "the model"
    return f"{found} on this machine, too little for {wanted}; {', or '.join(ways)}"


def _context(asked: int | None, longest: int) -> int:
    """Return the tokens of context for a model that was made for `longest`.

    Raises:
        UsageError: if `asked` is larger than `longest`.
    """
    if asked is not None and asked > longest:
        raise UsageError(f"-c {asked} is over the {longest} tokens that this model was made for; give a smaller -c")
    return asked or min(DEFAULT_CONTEXT, longest)
