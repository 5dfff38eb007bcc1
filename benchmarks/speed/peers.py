"""TPI against llama.cpp and transformers: prefill and decode of one node, same weights, same threads, in turn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.result import Bars, Check, Result, Row, Table
from benchmarks.support.engines import Engine, Spec, Turn, Turns, engines, take_turns
from benchmarks.support.models import Model, llama_1b, smollm2

THREADS = 2
TPI, LLAMA, FLASH, TRANSFORMERS = "TPI", "llama.cpp", "llama.cpp, flash attention", "transformers f32"
SPECS = {
    TPI: Spec("tpi", "", THREADS),
    LLAMA: Spec("llama.cpp", "", THREADS),
    FLASH: Spec("llama.cpp", "", THREADS, flash=True),
    TRANSFORMERS: Spec("transformers", "", THREADS),
}
SHORT, LONG = (128, 64), (512, 16)  # tokens of prompt, tokens made after the first
QUICK = ((128, 16), (512, 4))
NOTES = """
Each engine has a process of its own, {threads} threads, a context of 1024, and keys and values in f16 (f32 in
transformers). All get the same token ids and choose greedily. Prefill is the time from the token ids of the prompt to
the first token, with the logits of the last token only. Decode follows a prompt of 128 tokens. llama.cpp is measured
with both of its attention settings, and the better one counts. transformers takes part in every third round. The 1.1B
model has random weights in TinyLlama's shape. Peak memory is the VmHWM of the process after all turns, including
loading.

{versions}
"""


@dataclass(frozen=True)
class Metric:
    """One column of the table: the turns that it covers, and the figure that it shows for a turn."""

    name: str
    work: tuple[int, int]
    of: Callable[[Turn], float]


@dataclass(frozen=True)
class Bounds:
    """Promises for one model, as ratios: to the better llama.cpp, and of decode to transformers."""

    decode: float
    prefill: float
    transformers: float = 8.0


def bench(quick: bool) -> Result:
    """Measure two models with each engine."""
    work = QUICK if quick else (SHORT, LONG)
    versions, tables, checks, plots = "", [], [], []
    for model, bounds, rounds in ((smollm2(), Bounds(1.6, 1.4), 15), (llama_1b(), Bounds(1.1, 1.1), 9)):
        with engines(_specs(model)) as running:
            turns = take_turns(running, 2 if quick else rounds, work, rarely=TRANSFORMERS)
            versions = "; ".join(dict.fromkeys(engine.about for engine in list(running.values())[1:]))
            tables.append(Table(f"{model.name}, tokens/s (TPI's times this engine's)", _rows(turns, running, work)))
        checks += _checks(model, turns, bounds, work)
        metrics = _metrics(work)
        bars = {name: [typical(turns, name, metric) for metric in metrics] for name in running}
        plots.append(Bars(model.name, "tokens/s", [metric.name for metric in metrics], bars))
    return Result("Peers", NOTES.format(threads=THREADS, versions=versions), tables, checks, plots)


def _specs(model: Model) -> dict[str, Spec]:
    return {name: Spec(spec.kind, str(model.path), spec.threads, flash=spec.flash) for name, spec in SPECS.items()}


def _metrics(work: Sequence[tuple[int, int]]) -> list[Metric]:
    short, long = work
    return [
        Metric("prefill 128", short, lambda turn: turn.prefill),
        Metric("prefill 512", long, lambda turn: turn.prefill),
        Metric("decode", short, lambda turn: turn.decode),
    ]


def typical(turns: Turns, name: str, metric: Metric) -> float:
    """Return the median of one figure over all rounds of the engine `name`."""
    return median(metric.of(turn) for turn in turns[metric.work][name] if turn)


def ratio(turns: Turns, name: str, metric: Metric) -> float:
    """Return the median ratio of TPI's figure to the other engine's figure of the same round."""
    pairs = zip(turns[metric.work][TPI], turns[metric.work][name], strict=True)
    return median(metric.of(ours) / metric.of(theirs) for ours, theirs in pairs if ours and theirs)


def _rows(turns: Turns, running: dict[str, Engine], work: Sequence[tuple[int, int]]) -> list[Row]:
    rows: list[Row] = []
    for name, engine in running.items():
        row: dict[str, str | float] = {"engine": name}
        for metric in _metrics(work):
            figure = f"{typical(turns, name, metric):.1f}"
            row[metric.name] = figure if name == TPI else f"{figure} ({ratio(turns, name, metric):.2f}x)"
        rows.append(row | {"peak memory, MiB": round(engine.memory())})
    return rows


def _checks(model: Model, turns: Turns, bounds: Bounds, work: Sequence[tuple[int, int]]) -> list[Check]:
    checks = []
    for metric in _metrics(work):
        bound = bounds.decode if metric.name == "decode" else bounds.prefill
        value = min(ratio(turns, LLAMA, metric), ratio(turns, FLASH, metric))
        checks.append(Check(f"{model.name}: {metric.name}, times llama.cpp", value, bound))
    decode = _metrics(work)[-1]
    value = ratio(turns, TRANSFORMERS, decode)
    return [*checks, Check(f"{model.name}: decode, times transformers f32", value, bounds.transformers)]
