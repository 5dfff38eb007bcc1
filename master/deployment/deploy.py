"""Making a deployment: plan which node holds what, check that it fits, load weights, and choose the collective."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from allreduce.algorithms import shared
from allreduce.algorithms.torchdist import refuse_keys
from allreduce.base import Endpoints
from allreduce.stages import most_in_flight
from master.deployment.assignments import assignments
from master.deployment.deployment import Capacity, Concurrency, Deployment, choose_collective
from master.deployment.mtp import MtpLayer, open_mtp, words
from master.deployment.planner import Split, most_that_fit
from master.deployment.stages import Stage, deal_stages, in_rank_order, lay_out, stages_in, together
from master.options import RunOptions
from master.vocabulary.vocabulary import Vocabulary, table_bytes
from master.workers.cluster import Cluster
from master.workers.predictors import PredictorSource, predictors_for
from master.workers.weights import PackSource, own_blocks
from scheduler.free import default_budget
from scheduler.model.sizes import LONGEST_CHUNK, STAGE_CHUNK
from tpi.errors import PlanError, UsageError
from tpi.kernels.kv import KvDtype, pages_for
from tpi.net.fields import Card, UsualRequest
from tpi.net.messages import Assign, NodeOptions, StagePlan
from tpi.pack.reader import Pack
from tpi.progress import Progress, note, phase, warn
from tpi.system.machine import usable_cores
from worker.equipment import Equipment
from worker.node.node import Node
from worker.node_plan import node_plan
from worker.plan.choose import check
from worker.plan.fit import Tables
from worker.profile import limit_options
from worker.shards.cache import ShardCache

if TYPE_CHECKING:
    from worker.pipelines.agree import GroupMember

MASTER = "master"
_IN_MEMORY = 1.5  # memory of a model with its working memory, at most, as a multiple of the weights' size


@dataclass(frozen=True)
class Deployer:
    """The settings and resources that all deployments of one run share. `context` is in tokens."""

    options: RunOptions
    cluster: Cluster
    pack: Pack
    context: int
    equipment: Equipment
    make_room: Callable[[], None]  # called when the shard caches of this machine have grown

    @cached_property
    def able(self) -> Equipment:
        """The devices of this machine that can compute the model."""
        return self.equipment.for_model(self.pack.config)

    @cached_property
    def predictors(self) -> PredictorSource | None:
        """The predictors of active neurons for the nodes; None if all neurons are computed."""
        return predictors_for(self.options, self.pack)

    def deploy(self, shares: Sequence[float] | Split) -> Deployment:
        """Return the deployment of the next epoch, with each node's share of every layer, the master first.

        An earlier deployment stays open; the caller closes it.

        Raises:
            PlanError: before any weight moves, if a node cannot hold its part.
            NodeLost, NodeError: if a worker is lost or fails.
            WeightsError: if weights cannot be read or stored.
        """
        stages = deal_stages(self.pack, self._layout(shares), shares)
        self._refuse_with_stages(stages)
        with ExitStack() as stack:
            at_once, plans = self._plans_that_fit(stages, self._board(stack, stages))
            node, limits, resident = self._load(stack, plans)
            fence = (self.cluster.session, plans[0].epoch)
            with phase("measuring the links"):
                choose_collective(fence, node, self.cluster, self.pack.config.hidden)
            vocabulary = Vocabulary(
                self.pack, node.budget, node.trace, node.window.reads, self.options.verify_weights, self.equipment.host
            )
            stack.enter_context(vocabulary)
            if node.link is not None and node.link.offload.head_bytes:
                vocabulary.compute_head_on(node.link.device)
            alone = resident or self.pack.config.mixture is None  # experts on demand are computed in groups of rows
            drafts = plans[0].options.sparsity == "off" and not any(self._cards()) and alone
            mtp = self._mtp(stack, plans[0].options, node, vocabulary) if drafts else None
            return Deployment(
                fence, stages, node, self.cluster, vocabulary, limits, stack.pop_all(), at_once, drafts, mtp
            )

    def _mtp(self, stack: ExitStack, options: NodeOptions, node: Node, vocabulary: Vocabulary) -> MtpLayer | None:
        """Load the layer for multi-token prediction into what `node` leaves of its memory.

        Return None if the pack has no such layer, if a draft model takes its place, or, with a warning, if it does not
        fit.
        """
        if not self.pack.mtp or self.options.draft is not None:
            return None
        left = max(1, options.memory - node.budget.used) if options.memory else 0
        own = replace(options, memory=left, scheduler="resident", sparsity="off", batch=None)
        cache, shapes = ShardCache(self.options.cache / "shards"), [block.shape for block in self.pack.mtp]
        stack.callback(cache.close)
        try:
            layer = open_mtp(stack, self.pack, own, vocabulary, self.equipment.host, cache)
            note(words(shapes, layer.nbytes))
            return layer
        except PlanError:
            warn(words(shapes, None))
            return None

    def _layout(self, shares: Sequence[float] | Split) -> list[StagePlan]:
        """Return the layers and nodes of each stage. If nodes that `--stages` needs are missing, use the present ones.

        Raises:
            UsageError: if the first deployment cannot be as `--stages` asks.
        """
        asked, cuts = self.options.stages, self.pack.config.stage_cuts
        try:
            return lay_out(asked, [peer.name for peer in self.cluster.peers(MASTER)], cuts, shares)
        except UsageError as error:
            if not self.cluster.epoch:
                raise
            found = in_rank_order(min(stages_in(asked), len(cuts) - 1), cuts, shares)
            warn(f"{error}; going on with {len(found)} of {stages_in(asked)} stages, in the order of the nodes")
            return found

    def _refuse_with_stages(self, stages: Sequence[Stage]) -> None:
        """Raise UsageError, which names the option, if an option does not work with several stages."""
        if together(stages, 1 + len(self.cluster.workers)):
            return
        if refused := needs_one_stage(self.options, self.predictors is not None):
            raise UsageError(f"{refused} needs all nodes in one stage; leave out --stages or {refused}")

    def _board(self, stack: ExitStack, stages: Sequence[Stage]) -> str:
        """Return the address of shared memory for sums between nodes of this machine; empty if they do not use it."""
        workers = len(self.cluster.workers)
        local = workers if self.options.local and together(stages, 1 + workers) else 0
        asked = (self.options.collective, self.options.wire)
        wanted = asked[0] in (None, "shared") and asked[1] in (None, "f32")  # sums in shared memory are f32
        if not local or not wanted or not shared.available():
            return ""
        return stack.enter_context(shared.BoardMemory(1 + local)).address

    def _plans_that_fit(self, stages: Sequence[Stage], board: str) -> tuple[Concurrency, list[Assign]]:
        """Return plans with pages for as many requests as the user wants, or for as many as fit.

        Raises:
            PlanError: if no request fits.
        """
        alone, most = self.options.parallel, self.options.batched
        with suppress(PlanError):  # `most_that_fit` raises a lasting refusal again
            if aimed := self._fastest(stages, board, most):
                found, plans = most_that_fit(aimed, lambda batch: self._checked(stages, board, batch, batch))
                return Concurrency(found, aimed, most, batches=True), plans
        found, plans = most_that_fit(alone, lambda requests: self._checked(stages, board, requests))
        return Concurrency(found, alone, max(alone, most), batches=plans[0].options.batch is not None), plans

    def _fastest(self, stages: Sequence[Stage], board: str, most: int) -> int:
        """Return the fastest number of concurrent requests, at most `most`; 0 if no accelerator batches requests."""
        if not most or not any(self._cards()) or not together(stages, 1 + len(self.cluster.workers)):
            return 0
        from master.deployment.batching import fastest

        members = self._members(self._plans(stages, board, most))
        return min(most, fastest(members, self.options.devices.offload))  # the context alone may take more pages

    def _checked(self, stages: Sequence[Stage], board: str, requests: int, batch: int = 0) -> list[Assign]:
        """Return plans with pages for `requests` requests.

        If `batch` is not 0, accelerators compute `batch` of them at once.

        Raises:
            PlanError: if the requests do not fit.
        """
        plans = self._batched(self._plans(stages, board, requests), batch)
        self._check_memory(plans)
        return plans

    def _pages(self, requests: int) -> int:
        """Return the pages for `requests` usual requests, at least as many as one request of the full context takes."""
        longest, usual = pages_for(self.context), self._usual
        return max(longest, requests * (pages_for(usual.tokens) if usual else longest))

    @property
    def _usual(self) -> UsualRequest | None:
        if (usual := self.options.usual) is None:
            return None
        prompt = max(1, min(usual.prompt, self.context - 1))
        return UsualRequest(prompt, max(1, min(usual.answer, self.context - prompt)))

    def _plans(self, stages: Sequence[Stage], board: str, requests: int) -> list[Assign]:
        chosen, cluster = self.options, self.cluster
        if chosen.collective == "torch":
            refuse_keys(cluster.peers(MASTER))
        options = NodeOptions(
            context=self.context,
            pages=self._pages(requests),
            kv_dtype=chosen.kv_dtype or kv_dtype(self.pack),
            prefill_tokens=LONGEST_CHUNK,
            memory=chosen.memory or 0,
            threads=chosen.threads or 0,
            scheduler="window" if chosen.scheduler else "resident",
            window=chosen.window,
            retain=chosen.retain,
            trace=chosen.trace is not None,
            verify_weights=chosen.verify_weights,
            sparsity=chosen.sparsity if self.predictors else "off",
            usual=self._usual,
        )
        plans = assignments(
            self.pack,
            stages,
            cluster.peers(MASTER, board),
            options,
            cluster.session,
            cluster.epoch + 1,
            chosen.collective or ("shared" if board else "auto"),
            wire(chosen.wire, self.pack),
            self.predictors,
        )
        limit = master_memory(chosen) if chosen.scheduler else 0
        own = replace(options, threads=own_threads(chosen), memory=limit)
        return [replace(plans[0], options=own), *plans[1:]]

    def _batched(self, plans: list[Assign], batch: int) -> list[Assign]:
        if not any(self._cards()) or len(plans[0].stages[0].ranks) < len(plans):
            return plans
        from master.deployment.batching import batched  # imports more than a run without accelerators needs

        return batched(plans, self._members(plans), self.options.devices.offload, batch)

    def _members(self, plans: list[Assign]) -> "list[GroupMember]":
        from master.deployment.batching import members_of

        speeds = [None, *(hello.profile.speed for hello in self.cluster.hellos)]
        told = list(zip(self._taken(plans), self._cards(), speeds, strict=True))
        return members_of(told, self.options.devices.offload, self.able.accelerator)

    def _cards(self) -> list[Card | None]:
        return [self.able.card, *(hello.profile.card for hello in self.cluster.hellos)]

    def _tables(self, own: Assign) -> Tables:
        """Return the bytes of tables and predictors, which the master needs in addition to its part of the layers."""
        sent = self.predictors.memory_bytes(own.size) if self.predictors else 0
        return replace(table_bytes(self.pack), predictor_bytes=sent)

    def _taken(self, plans: Sequence[Assign]) -> Iterator[tuple[str, Assign, Tables | None]]:
        """Yield each node's name, its plan with the limits that the node set itself, and its tables.

        Only the master has tables; for workers they are None.
        """
        workers = zip(plans[1:], self.cluster.hellos, strict=True)
        taken = [replace(plan, options=limit_options(plan.options, hello.profile)) for plan, hello in workers]
        for peer, own in zip(self.cluster.peers(MASTER), [plans[0], *taken], strict=True):
            yield peer.name, own, self._tables(own) if own.rank == 0 else None

    def _check_memory(self, plans: Sequence[Assign]) -> None:
        """Raise PlanError, before any weight moves, if a node's memory cannot hold its plan."""
        for taken, card in zip(self._taken(plans), self._cards(), strict=True):
            _check_one(*taken, card)

    def _load(self, stack: ExitStack, plans: Sequence[Assign]) -> tuple[Node, Capacity, bool]:
        """Load the weights of every node.

        Return the master's own node, the capacity of all nodes, and True if all weights are in memory.
        """
        cluster, cache = self.cluster, ShardCache(self.options.cache / "shards")
        stack.callback(cache.close)
        cluster.begin(plans[1:], PackSource(self.pack, self.predictors))
        with phase("loading weights") as report:
            progress = _checked_for_losses(cluster, report)
            held = own_blocks(self.pack, plans[0], cache, progress, self.predictors)
            links = self.options.links_cache
            endpoints = Endpoints(
                net=cluster.net,
                watch=cluster.watch,
                awaited=cluster.awaited,
                lateness=cluster.lateness,
                links_cache=links,
            )
            node = self.able.build(plans[0], held, endpoints, progress, self._tables(plans[0]))
        stack.callback(node.close)
        with phase("sending weights to the workers") as progress:
            ready = cluster.finish(progress)
        if cache.completed or any(worker.feeder and worker.feeder.stats.sent for worker in cluster.workers):
            self.make_room()
        chunk = min([node.prefill_tokens, *(one.prefill_tokens for one in ready)])
        at_once = most_in_flight([stage.ranks for stage in plans[0].stages])
        chunk = max(min(chunk, STAGE_CHUNK), chunk // at_once)  # smaller steps, so that prompts fill all stages
        resident = node.resident and all(one.resident_bytes >= one.weight_bytes for one in ready)
        return node, Capacity(self.context, chunk, min([node.pages, *(one.pages for one in ready)])), resident


def needs_one_stage(options: RunOptions, sparse: bool) -> str:
    """Return the flag in use that needs all nodes in one stage, or an empty string if there is none.

    `sparse` says whether only active neurons are computed.
    """
    needs = {
        "--sparsity": sparse,
        "--pipeline batch": options.devices.offload.pipeline == "batch",
        "--collective torch": options.collective == "torch",
        "--collective shared": options.collective == "shared",
    }
    return next((flag for flag, wanted in needs.items() if wanted), "")


def _checked_for_losses(cluster: Cluster, report: Progress) -> Progress:
    """Return a function that calls `report`, but raises as soon as a worker is lost."""

    def progress(done: int, total: int) -> None:
        cluster.check()
        report(done, total)

    return progress


def _check_one(name: str, own: Assign, tables: Tables | None, card: Card | None) -> None:
    try:
        check(node_plan(own), tables, card)
    except PlanError as error:
        raise PlanError(f"{name}: {error}", name, error.context) from None


def own_memory(options: RunOptions) -> int:
    """Return the bytes for each node of this machine: the user's setting, or a node's part of the free memory."""
    return options.memory or options.local_memory or default_budget(options.local)


def master_memory(options: RunOptions) -> int:
    """Return the bytes that the master may use for the model itself: `own_memory` without its draft model."""
    return max(1, own_memory(options) - options.draft_memory)  # 0 would be no limit


def one_process_is_faster(options: RunOptions, pack: Pack) -> bool:
    """Return True if several nodes on this machine would be slower than one process, because they share cores.

    Several nodes are useful only if limits on memory or threads per node give one process alone less.
    """
    if not options.local or options.other_devices or options.threads:
        return False
    memory = options.memory or own_memory(options) * (1 + options.local)
    return _IN_MEMORY * sum(file.stat().st_size for file in pack.path.glob("*.safetensors")) < memory


def own_limit(options: RunOptions) -> int:
    """Return the memory limit of each node of this machine, in bytes; 0 (no limit) with `--no-scheduler`."""
    return own_memory(options) if options.scheduler else 0


def own_threads(options: RunOptions) -> int:
    """Return the compute threads of the master and of each local worker: nodes of one machine share its cores."""
    return options.threads or max(1, usable_cores() // (1 + options.local))


def wire(asked: str | None, pack: Pack) -> str:
    """Return the wire format of partial sums: `asked` if given, else f32 for f32 weights and bf16 for others.

    Raises:
        UsageError: if the weights are f32 and another wire format is asked for.
    """
    exact = pack.format == "f32"
    if asked not in (None, "f32") and exact:
        raise UsageError(f"f32 weights need --wire f32, not --wire {asked}; leave --wire out, or give another --dtype")
    return asked or ("f32" if exact else "bf16")


def kv_dtype(pack: Pack) -> KvDtype:
    """Return the format of the KV cache: f32 for f32 weights, so that results are exact; else f16."""
    return "f32" if pack.format == "f32" else "f16"
