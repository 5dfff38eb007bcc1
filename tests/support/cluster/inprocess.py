"""A whole group in one process, for fast tests: nodes are threads that exchange sums through shared memory."""

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from allreduce.algorithms.loopback import Board
from allreduce.base import Endpoints
from master.deployment.assignments import assignments
from master.deployment.deploy import kv_dtype
from master.deployment.deployment import Capacity, Deployment
from master.deployment.mtp import open_mtp
from master.deployment.stages import ONE, deal_stages, lay_out
from master.generation.engine import Engine
from master.vocabulary.vocabulary import Vocabulary, table_bytes
from master.workers.predictors import PredictorSource
from master.workers.weights import own_blocks
from scheduler.storage.disk import Disk
from tpi.devices.host import HostDevice, open_host
from tpi.kernels.kv import KvDtype, pages_for
from tpi.net.messages import NodeOptions, PeerAddress, Step
from tpi.net.sockets import COLLECTIVE, Net
from tpi.pack.reader import Pack
from tpi.sparsity.predictor import Predictor
from worker.equipment import AcceleratorSetup
from worker.node.build import build_node
from worker.node.node import Node
from worker.shards.cache import ShardCache

CONTEXT = 128
NOBODY: Mapping[int, AcceleratorSetup] = {}


class ThreadedWorkers:
    """Ranks 1 and up, each in a thread; the in-process twin of `master.workers.cluster.Cluster`."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = nodes
        self._queues: list[SimpleQueue[Step | None]] = [SimpleQueue() for _ in nodes]
        self._threads = [Thread(target=_serve, args=pair) for pair in zip(nodes, self._queues, strict=True)]
        for thread in self._threads:
            thread.start()

    def step(self, step: Step, first: Container[int] | None = None) -> None:
        for rank, queue in enumerate(self._queues, 1):
            queue.put(step if first is None or rank in first else replace(step, x=step.x[:0]))

    def close(self) -> None:
        for queue in self._queues:
            queue.put(None)
        for thread in self._threads:
            thread.join()


def _serve(node: Node, queue: "SimpleQueue[Step | None]") -> None:
    while (step := queue.get()) is not None:
        node.run(step)


@contextmanager
def in_process_engine(
    pack: Pack,
    shares: Sequence[float],
    cache: Path,
    chunk: int = 16,
    context: int = CONTEXT,
    kv: KvDtype | None = None,
    pool: int | None = None,
) -> Iterator[Engine]:
    """Run an engine with one in-process node per share and `pool` pages; `kv` None: the default of a session."""
    with closing(in_process_deployment(pack, shares, cache, chunk, context, kv, pool=pool)) as deployment:
        yield Engine(deployment)


def in_process_deployment(
    pack: Pack,
    shares: Sequence[float],
    cache: Path,
    chunk: int = 16,
    context: int = CONTEXT,
    kv: KvDtype | None = None,
    epoch: int = 1,
    host: HostDevice | None = None,
    disk: Disk | None = None,
    accelerators: Mapping[int, AcceleratorSetup] = NOBODY,
    pool: int | None = None,
    predictors: Mapping[int, Predictor] | None = None,
    hosts: Mapping[int, HostDevice] | None = None,
    stages: str = ONE,
    **more: Any,
) -> Deployment:
    """Return a deployment with one in-process node per share, `pool` pages and `more` node options.

    `stages` is the value of `--stages` for nodes called n0, n1 and so on. With several stages, nodes have sockets.

    Rank 0 has `host` and `disk` in place of the real ones. `accelerators` and `hosts` (which replace all
    real hosts) are given by rank, `predictors` by layer.
    """
    pool = pool or 4 * pages_for(context)  # pages: room for several sequences
    options = NodeOptions(context, pool, kv or kv_dtype(pack), chunk, **more)
    names = [f"n{rank}" for rank in range(len(shares))]
    dealt = deal_stages(pack, lay_out(stages, names, pack.config.stage_cuts, shares), shares)
    sent = PredictorSource(predictors) if predictors is not None else None
    with ExitStack() as stack:
        endpoints = _endpoints(stack, len(shares), stages != ONE)
        peers = [
            PeerAddress(rank, name, address)
            for rank, (name, (_, address)) in enumerate(zip(names, endpoints, strict=True))
        ]
        named = "loopback" if stages == ONE else "star"
        plans = assignments(pack, dealt, peers, options, session=1, epoch=epoch, collective=named, predictors=sent)
        nodes = []
        for rank, one in enumerate(plans):
            shard_cache = ShardCache(cache / str(rank))
            stack.callback(shard_cache.close)
            tables = table_bytes(pack) if rank == 0 else None
            held = own_blocks(pack, one, shard_cache, sent=sent)
            its: dict[str, Any] = {"host": host, "disk": disk} if rank == 0 else {}
            its["accelerator"] = accelerators.get(rank)
            its |= {"host": hosts[rank]} if hosts else {}
            nodes.append(build_node(one, held, endpoints[rank][0], tables=tables, **its))
            stack.callback(nodes[-1].close)
        workers = ThreadedWorkers(nodes[1:])
        stack.callback(workers.close)
        vocabulary = stack.enter_context(Vocabulary(pack, nodes[0].budget))
        if nodes[0].link is not None and nodes[0].link.offload.head_bytes:
            vocabulary.compute_head_on(nodes[0].link.device)
        limits = Capacity(context, min([chunk, *(node.prefill_tokens for node in nodes)]), pool)
        alone = pack.config.mixture is None or all(node.resident for node in nodes)
        drafts, mtp = not accelerators and not predictors and alone, None
        if drafts and pack.mtp:
            shard_cache = ShardCache(cache / "mtp")
            stack.callback(shard_cache.close)
            own = replace(options, scheduler="resident")
            mtp = open_mtp(stack, pack, own, vocabulary, host or open_host(), shard_cache)
        return Deployment(
            (1, epoch), dealt, nodes[0], workers, vocabulary, limits, stack.pop_all(), drafts=drafts, mtp=mtp
        )


def _endpoints(stack: ExitStack, size: int, sockets: bool) -> list[tuple[Endpoints, str]]:
    """Return each node's endpoints and address: one shared board, or a bound socket each."""
    if not sockets:
        return [(Endpoints(board=Board(size)), "")] * size
    net = stack.enter_context(closing(Net()))
    bound = [net.bind(COLLECTIVE, "127.0.0.1", 0) for _ in range(size - 1)]
    workers = [(Endpoints(net, router), f"tcp://127.0.0.1:{port}") for router, port in bound]
    return [(Endpoints(net), ""), *workers]
