"""Only active neurons on the CPU: tokens per second against the dense run, and the predictors' share of the time."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from benchmarks.result import Check, Result, Row, Table
from benchmarks.support.models import reglu_1b
from master.deployment.deployment import Deployment
from master.generation.engine import Engine
from master.vocabulary.sampler import Sampler, Sampling
from tests.support.cluster.inprocess import in_process_deployment
from tests.support.generating import generate
from tpi.pack.reader import Pack
from tpi.sparsity.files import NAME, load_predictors
from worker.neurons.judge import SparsityJudge

ROUNDS, TOKENS, PROMPT = 8, 12, [3, 4, 5]
GAIN, PREDICTING = 2.0, 0.1
NOTES = f"""
The 1.1B shape with ReLU in 4 bits, about 10% of the neurons active, on this machine's CPU. Figures are medians of
{ROUNDS} interleaved rounds of {TOKENS} tokens each. Both read one pack, which stores the weights of each neuron
together; stored in tiles, all neurons would be computed up to 1.4 times as fast. *predicting* is the predictors' share
of a token's time.
"""


def bench(quick: bool) -> Result:
    """Measure dense and sparse in turn, on one node."""
    pack = Pack.open(reglu_1b().path)
    with ExitStack() as stack:
        cache = Path(stack.enter_context(TemporaryDirectory()))
        dense = stack.enter_context(closing(_deployment(pack, cache / "dense", "off")))
        sparse = stack.enter_context(closing(_deployment(pack, cache / "sparse", "static")))
        times = by_turns([dense, sparse], 2 if quick else ROUNDS)
        assert sparse.node.sparse is not None
        judge = sparse.node.sparse.judge
        steps = sparse.node.loop.clock
        share = judge.predicting / steps.total
    rows = [_row("all neurons", times[0], times[0], None, 0.0), _row("active ones", times[1], times[0], judge, share)]
    checks = [
        Check("sparse over dense", median(times[0]) / median(times[1]), GAIN),
        Check("predictors' share of the time", share, PREDICTING, at_most=True),
    ]
    return Result("Active neurons alone", NOTES, [Table("1.1B, q4, 10% active, CPU only", rows)], checks)


def _deployment(pack: Pack, cache: Path, sparsity: str) -> Deployment:
    more: dict[str, Any] = {} if sparsity == "off" else {"predictors": load_predictors(pack.path / NAME)}
    return in_process_deployment(pack, [1.0], cache, context=256, sparsity=sparsity, **more)


def by_turns(deployments: list[Deployment], rounds: int) -> list[list[float]]:
    """Return the seconds per token in each round, for each deployment. The warm-up round does not count."""
    pace = [_paces(deployment) for deployment in deployments]
    found: list[list[float]] = [[] for _ in deployments]
    for number in range(rounds + 1):
        for times, each in zip(found, pace, strict=True):
            seconds = next(each)
            if number:
                times.append(seconds)
    return found


def _paces(deployment: Deployment) -> Iterator[float]:
    engine = Engine(deployment)
    sequence, greedy = engine.admit(PROMPT), Sampler(Sampling(temperature=0))
    tokens = generate(engine, sequence, greedy, 240)
    while True:
        began = perf_counter()
        for _ in range(TOKENS):
            next(tokens)
        yield (perf_counter() - began) / TOKENS


def _row(name: str, times: list[float], dense: list[float], judge: SparsityJudge | None, predicting: float) -> Row:
    return {
        "computed": name,
        "tokens/s": 1 / median(times),
        "gain": median(dense) / median(times),
        "neurons": 1.0 if judge is None else judge.chosen / judge.of,
        "predicting": predicting,
    }
