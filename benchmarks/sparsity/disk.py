"""A sparse model twice as large as memory: single neurons read from disk against the plain window, in turn."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from unittest.mock import patch

from benchmarks.result import Check, Result, Row, Table
from benchmarks.support.models import profiled_reglu_1b
from master.deployment.deployment import Deployment
from master.generation.engine import Engine
from master.vocabulary.sampler import Sampler, Sampling
from scheduler.demand.records.stats import RecordStats
from tests.support.cluster.inprocess import in_process_deployment
from tests.support.generating import generate
from tpi.pack.reader import Pack
from tpi.sparsity.files import NAME, load_predictors
from tpi.sparsity.predictor import Predictor
from worker.plan.case import Candidate, Case
from worker.plan.modes import neurons
from worker.plan.records import RecordPlan, read_by_neuron

ROUNDS, TOKENS, WARM, PROMPT = 6, 8, 16, [3, 4, 5]
AHEAD, SHARE = 1, 0.5
GAIN, LEAST_READ, TENTH = 2.0, 32 << 10, 0.1
NOTES = f"""
The 1.1B shape with ReLU in 4 bits, about 10% of the neurons active, in any order. It is profiled and its neurons are
renumbered as by `tpi profile`, on tokens that do not occur in the answers. The memory for everything is {SHARE:.0%} of
the model. *plain window*: some blocks are resident, and the other blocks are streamed whole (`--sparsity off`).
*by neurons*: attention and predictors are resident, and the rest of the memory is slots for records
(`--sparsity static`), with predictors that look {AHEAD} layer ahead. Neurons have the model's own numbers or are
renumbered. Reads have the sizes that suit this disk, or at least {LEAST_READ >> 10} KiB. Figures are medians of
{ROUNDS} rounds of {TOKENS} tokens each, interleaved, after {WARM} tokens; reads bypass the page cache.
"""


@dataclass(frozen=True)
class Kind:
    """One way to load neurons. `least` is the least bytes of a read; None stands for the plain window."""

    name: str
    renumbered: bool
    least: int | None


KINDS = (
    Kind("plain window", True, None),
    Kind("by neurons, own numbers", False, 0),
    Kind("by neurons, renumbered", True, 0),
    Kind("the same, long reads", True, LEAST_READ),
)


def bench(quick: bool) -> Result:
    """Measure every kind of loading in turn, on one node each."""
    packs = [Pack.open(path) for path in profiled_reglu_1b()]
    with ExitStack() as stack:
        cache = Path(stack.enter_context(TemporaryDirectory()))
        opened = [stack.enter_context(closing(_deployment(packs[kind.renumbered], cache, kind))) for kind in KINDS]
        times, stats = _by_turns(opened, 2 if quick else ROUNDS)
        streamed = opened[0].node.budget.placement.streamed_bytes
    plain = median(times[0])
    kinds = zip(KINDS, times, stats, strict=True)
    rows = [_row(kind.name, taken, read, plain, streamed) for kind, taken, read in kinds]
    own, free, long = stats[1:]
    checks = [
        Check("by neurons over the plain window", plain / median(times[2]), GAIN),
        Check(f"the same in reads of {LEAST_READ >> 10} KiB at least", plain / median(times[3]), GAIN),
        Check("reads a token, renumbered over the model's own numbers", free.reads / own.reads, 1.0, at_most=True),
        Check("a mean read then, KiB", long.mean_read / 1024, LEAST_READ / 1024),
        Check("of all neurons' bytes that is read", free.read_bytes / free.dense_bytes, TENTH, at_most=True),
    ]
    return Result("Neurons from disk", NOTES, [Table(f"1.1B, q4, {SHARE:.0%} of it in memory", rows)], checks)


def _predictors(pack: Pack) -> dict[int, Predictor]:
    return {
        layer: replace(predictor, ahead=min(layer, AHEAD))
        for layer, predictor in load_predictors(pack.path / NAME).items()
    }


def _deployment(pack: Pack, cache: Path, kind: Kind) -> Deployment:
    model, plain = sum(file.stat().st_size for file in pack.path.glob("*.safetensors")), kind.least is None

    def decided(case: Case) -> Candidate[RecordPlan] | None:
        found = read_by_neuron(case)
        return found and replace(found, details=replace(found.details, min_read_bytes=kind.least or 0))

    with patch.object(neurons, "read_by_neuron", decided):
        return in_process_deployment(
            pack, [1.0], cache / kind.name, context=256, pool=8, sparsity="off" if plain else "static",
            scheduler="window", memory=int(SHARE * model), predictors=None if plain else _predictors(pack),
        )  # fmt: skip


def _by_turns(deployments: list[Deployment], rounds: int) -> tuple[list[list[float]], list[RecordStats]]:
    """Return the seconds per token in each round, and all reads, for each deployment. Warm-up does not count."""
    paces = [_paces(deployment) for deployment in deployments]
    for pace in paces:
        for _ in range(WARM // TOKENS):
            next(pace)
    before = [_stats(deployment) for deployment in deployments]
    found = [[next(pace) for pace in paces] for _ in range(rounds)]
    stats = [_since(one, _stats(deployment)) for one, deployment in zip(before, deployments, strict=True)]
    return [list(times) for times in zip(*found, strict=True)], stats


def _since(before: RecordStats, after: RecordStats) -> RecordStats:
    return RecordStats(**{name: getattr(after, name) - getattr(before, name) for name in vars(after)})


def _paces(deployment: Deployment) -> Iterator[float]:
    engine = Engine(deployment)
    tokens = generate(engine, engine.admit(PROMPT), Sampler(Sampling(temperature=0)), 240)
    while True:
        began = perf_counter()
        for _ in range(TOKENS):
            next(tokens)
        yield (perf_counter() - began) / TOKENS


def _stats(deployment: Deployment) -> RecordStats:
    sparse = deployment.node.sparse
    if sparse is None:
        return RecordStats()
    assert sparse.records is not None, "this memory has no room for records"
    return sparse.records.stats()


def _row(name: str, times: list[float], stats: RecordStats, plain: float, streamed: int) -> Row:
    read = stats.read_bytes / stats.tokens if stats.tokens else streamed
    return {
        "": name,
        "tokens/s": 1 / median(times),
        "gain": plain / median(times),
        "MB read a token": read / 1e6,
        "reads a token": stats.reads / stats.tokens if stats.tokens else "",
        "KiB a read": stats.mean_read / 1024 if stats.reads else "",
        "found in memory": stats.hit_rate if stats.requested else "",
        "waited, of the time": stats.stall_seconds / (sum(times) * TOKENS) if stats.requested else "",
    }
