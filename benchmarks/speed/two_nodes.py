"""The cost of splitting: two nodes of one thread against one node of two, in turn on the same two cores."""

from statistics import median

from benchmarks.result import Check, Result, Row, Table
from benchmarks.support.engines import Spec, Turns, engines, take_turns
from benchmarks.support.models import llama_1b, smollm2

ONE, TWO = "one node of two threads", "two nodes of one thread"
NOTES = """
`--local 1 -t 1` against `-t 2`: the same cores and one memory bus. So the difference is the cost of the collective, of
the messages, and of the work that each node repeats (norms, residuals; the master computes embedding and head with one
thread). Decode follows a prompt of 128 tokens. The ratio is the median over the rounds.
"""


def bench(quick: bool) -> Result:
    """Measure the 1.1B model, which has a promise, and SmolLM2, whose tokens are too short to split well."""
    work = (128, 8 if quick else 48)
    rows: list[Row] = []
    checks = []
    for model, bound in ((llama_1b(), 0.70), (smollm2(), 0.0)):
        specs = {ONE: Spec("tpi", str(model.path), 2), TWO: Spec("tpi", str(model.path), 1, local=1)}
        with engines(specs) as running:
            turns = take_turns(running, 2 if quick else 15, [work])
        rates = {f"{metric} {name}": _rates(turns, name, metric) for metric in ("decode", "prefill") for name in specs}
        ratios = {metric: _ratio(rates, metric) for metric in ("decode", "prefill")}
        rows += [
            {"model": model.name, "phase": metric} | {name: median(rates[f"{metric} {name}"]) for name in specs}
            | {"ratio": ratios[metric]} for metric in ratios
        ]  # fmt: skip
        if bound:
            checks.append(Check(f"{model.name}: decode on two nodes, times one node", ratios["decode"], bound))
    return Result("Two nodes on one machine", NOTES, [Table("Tokens/s", rows)], checks)


def _rates(turns: Turns, name: str, metric: str) -> list[float]:
    (by_engine,) = turns.values()
    return [float(getattr(turn, metric)) for turn in by_engine[name] if turn]


def _ratio(rates: dict[str, list[float]], metric: str) -> float:
    pairs = zip(rates[f"{metric} {TWO}"], rates[f"{metric} {ONE}"], strict=True)
    return median(two / one for two, one in pairs)
