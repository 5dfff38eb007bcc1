"""Proposition 5: the peak memory that a node predicts, against VmHWM, for master and worker."""

from collections.abc import Iterator

from benchmarks.memory.budgeted import CONTEXT
from benchmarks.result import Check, Result, Row, Table
from benchmarks.support.commands import bench_process
from benchmarks.support.machine import MIB
from benchmarks.support.models import llama_1b, llama_1b_f32

TOLERANCE = 0.10
GENERATED = 4
CASES = {
    "window 2": ("--window", "2"),
    "window 4": ("--window", "4"),
    "600 MiB": ("--memory", "600MiB"),
    "1500 MiB": ("--memory", "1500MiB"),
    "everything": ("--no-scheduler",),
}
NOTES = f"""
1.1B Llama shape on a master and one worker, context {CONTEXT}. The prompt takes all but {GENERATED + 1} tokens of the
context, so that keys, values and the longest prefill step are all in memory. `predicted` is the memory of the bare
process (before it gets its part) plus the planned memory: weights and ring, KV cache, activations, tables, buffers.
MiB.
"""


def bench(quick: bool) -> Result:
    """Compare predicted with measured peak memory for every case, in two formats of weights."""
    rows: list[Row] = []
    for model, dtype in [(llama_1b(), "auto"), *([] if quick else [(llama_1b_f32(), "f32")])]:
        for case, flags in list(CASES.items())[:: 3 if quick else 1]:
            rows += _nodes(model.name, case, str(model.path), (*flags, "--dtype", dtype))
    worst = max(abs(float(row["off"])) for row in rows)
    over = max(float(row["peak"]) - float(row["predicted"]) for row in rows)
    checks = [
        Check("largest difference of predicted and measured peak", worst, TOLERANCE, at_most=True),
        Check("most MiB above the prediction", over, 0.0, at_most=True),
    ]
    return Result("Predicted peak memory", NOTES, [Table("Peaks", rows)], checks)


def _nodes(name: str, case: str, model: str, flags: tuple[str, ...]) -> Iterator[Row]:
    prompt = CONTEXT - GENERATED - 1
    fields = bench_process(model, *flags, "--local", "1", context=CONTEXT, prompt=prompt, generate=GENERATED)
    for node in fields["nodes"]:
        predicted, peak = node["bare_rss_bytes"] + node["planned_bytes"], node["peak_rss_bytes"]
        yield {
            "model": name,
            "case": case,
            "node": node["name"],
            "bare": round(node["bare_rss_bytes"] / MIB),
            "predicted": round(predicted / MIB),
            "peak": round(peak / MIB),
            "off": (predicted - peak) / peak,
        }
