"""One node in this process with any disk and any duration of an allreduce, to measure the steady state."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, sleep

from allreduce.algorithms.loopback import Loopback
from allreduce.base import F32, Endpoints, GroupSpec
from allreduce.flight import Exchange
from master.deployment.assignments import assignments
from master.deployment.deploy import kv_dtype
from master.deployment.deployment import Capacity, Deployment
from master.deployment.stages import one_stage
from master.generation.engine import Engine
from master.vocabulary.sampler import Sampler, Sampling
from master.vocabulary.vocabulary import Vocabulary, table_bytes
from master.workers.weights import own_blocks
from scheduler.storage.disk import Disk
from tests.support.cluster.inprocess import ThreadedWorkers
from tests.support.generating import generate
from tpi.config import default_cache
from tpi.kernels.kv import pages_for
from tpi.net.messages import NodeOptions, PeerAddress
from tpi.pack.reader import Pack
from tpi.progress import Progress, silent
from worker.node.build import build_node
from worker.node.node import Node
from worker.shards.cache import ShardCache

CONTEXT = 256
_PREFILL = 16  # tokens


@dataclass(frozen=True)
class Setting:
    """The settings of the node, in bytes and seconds."""

    memory: int = 1 << 40
    window: int = 0
    retain: int = 0
    exchange: float = 0.0  # that each allreduce takes
    verify: bool = False  # compare weights with their hashes


@dataclass(frozen=True)
class Pace:
    """Median seconds per token, and median seconds per token of waiting for weights."""

    token: float
    stall: float


class SlowLoopback(Loopback):
    """A group of one node whose allreduces take a given time."""

    def __init__(self, spec: GroupSpec, seconds: float) -> None:
        super().__init__(spec, Endpoints())
        self._seconds = seconds

    @property
    def trivial(self) -> bool:
        """False: an allreduce takes time."""
        return False

    def _allreduce(self, values: F32) -> Exchange:
        yield
        sleep(self._seconds)
        return values


@contextmanager
def single_node(
    pack: Pack, setting: Setting, disk: Disk | None = None, cache: Path | None = None, progress: Progress = silent
) -> Iterator[tuple[Engine, Node]]:
    """Run an engine with one node. `disk` replaces the real disk.

    `cache` stores which files of the pack are checked.
    """
    pool = pages_for(CONTEXT)
    options = NodeOptions(
        CONTEXT, pool, kv_dtype(pack), _PREFILL, setting.memory,
        scheduler="window", window=setting.window, retain=setting.retain, verify_weights=setting.verify,
    )  # fmt: skip
    stages = one_stage(pack, [1.0])
    one = assignments(pack, stages, [PeerAddress(0, "node", "")], options, 1, 1, "loopback")[0]
    with ExitStack() as stack:
        shards_cache = ShardCache((cache or default_cache()) / "shards")
        stack.callback(shards_cache.close)
        held = own_blocks(pack, one, shards_cache)
        node = build_node(one, held, Endpoints(), progress, table_bytes(pack), disk)
        stack.callback(node.close)
        if setting.exchange:
            node.loop.group = SlowLoopback(node.loop.group.spec, setting.exchange)
        vocabulary = stack.enter_context(Vocabulary(pack, node.budget, verify=setting.verify))
        limits = Capacity(CONTEXT, node.prefill_tokens, pool)
        yield Engine(Deployment((1, 1), stages, node, ThreadedWorkers([]), vocabulary, limits)), node


def pace(engine: Engine, node: Node, tokens: int, warm_up: int = 4) -> Pace:
    """Decode `tokens` tokens after `warm_up` others, and return their pace."""
    sequence, greedy = engine.admit([1, 2, 3]), Sampler(Sampling(temperature=0))
    seconds, stalls = [], []
    at, stalled = perf_counter(), 0.0
    for _ in generate(engine, sequence, greedy, warm_up + tokens):
        now, total = perf_counter(), node.streamed.stall_seconds
        seconds.append(now - at)
        stalls.append(total - stalled)
        at, stalled = now, total
    engine.release(sequence)
    return Pace(median(seconds[warm_up:]), median(stalls[warm_up:]))
