"""SmolLM2 with gate-first packs: the perplexity lost by skipping neurons, and speed against the ordinary pack."""

from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.result import Check, Result, Row, Table
from benchmarks.sparsity.host import by_turns
from benchmarks.support.models import smollm2
from master.deployment.deployment import Deployment
from master.deployment.gates import GateFirstPack
from master.deployment.sentgates import SentGates
from master.text.tokenizer import Tokenizer
from tests.support.cluster.inprocess import in_process_deployment
from tests.support.cluster.surprise import engine_perplexity
from tests.support.paths import DATA
from tpi.config import default_cache
from tpi.kernels import open_kernels
from tpi.pack.library.locate import locate, open_located
from tpi.pack.reader import Pack
from tpi.sparsity.gates import GateCurves, measure_curves
from tpi.sparsity.replay import chunks
from tpi.sparsity.thresholds import DEFAULT_ERROR

LENGTH, MEASURED, ROUNDS = 256, 1024, 8
ERRORS = (0.0, 0.02, DEFAULT_ERROR, 0.08)
WITHIN = 1.02
NOTES = f"""
SmolLM2-135M-Instruct in Q4_1 on one node. As in `tpi profile`, one half of a text determines the neurons that each
layer may skip. Perplexity is measured on {MEASURED} tokens of the other half, one token a step, through the engine.
*all* is the ordinary pack. The others are packs that are computed gate first and have their down matrix in q8.
*skipped* is the share of the neurons whose up and down vectors are not computed. Tokens/s are medians of {ROUNDS}
interleaved rounds. `--sparsity auto` decides by such a measurement, and stays off if skipping is not faster.
"""


def bench(quick: bool) -> Result:
    """Measure the ordinary pack, and gate-first packs at several errors."""
    cache = default_cache()
    located = locate(str(smollm2().path), cache)
    plain = open_located(located, "auto", cache)
    first = GateFirstPack(located, "auto", cache, lambda nbytes: None).open()
    ids = Tokenizer.load(plain).encode((DATA / "quality.txt").read_text())
    half, measured = len(ids) // 2, MEASURED // 4 if quick else MEASURED
    curves = measure_curves(plain, chunks(ids[:half], LENGTH), open_kernels())
    rows = _rows(plain, first, curves, ids[half : half + measured], 2 if quick else ROUNDS)
    chosen = rows[1 + ERRORS.index(DEFAULT_ERROR)]
    checks = [
        Check(
            "perplexity at the default --sparsity-error over dense",
            float(chosen["perplexity"]) / _dense(rows),
            WITHIN,
            True,
        ),
        Check("share of the neurons skipped there", float(chosen["skipped"]), 0.1),
    ]
    return Result("SwiGLU, gate first", NOTES, [Table("SmolLM2-135M, Q4_1, CPU", rows)], checks)


def _dense(rows: list[Row]) -> float:
    return float(rows[0]["perplexity"])


def _rows(plain: Pack, first: Pack, curves: GateCurves, ids: list[int], rounds: int) -> list[Row]:
    asked = [None, *(SentGates(curves, error) for error in ERRORS)]
    with ExitStack() as stack:
        cache = Path(stack.enter_context(TemporaryDirectory()))
        made = [
            stack.enter_context(closing(_deployment(plain if one is None else first, one, cache / str(at))))
            for at, one in enumerate(asked)
        ]
        found = [engine_perplexity(deployment, ids, LENGTH) for deployment in made]
        times = by_turns(made, rounds)
        skipped = [0.0 if one.node.gated is None else one.node.gated.skipped for one in made]
    names = ["all", *(f"error {error:g}" for error in ERRORS)]
    return [
        {
            "computed": name,
            "perplexity": value,
            "over all": value / found[0],
            "skipped": share,
            "tokens/s": 1 / median(each),
        }
        for name, value, share, each in zip(names, found, skipped, times, strict=True)
    ]


def _deployment(pack: Pack, gates: SentGates | None, cache: Path) -> Deployment:
    return in_process_deployment(pack, [1.0], cache, context=512, gates=gates)
