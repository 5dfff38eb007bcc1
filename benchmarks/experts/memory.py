"""Experts that are all resident in memory: decode against a dense model, and against llama.cpp on the same file."""

import json
from importlib.util import find_spec
from typing import Any

from benchmarks.result import Check, Result, Row, Table
from benchmarks.speed.peers import FLASH, LLAMA, SHORT, SPECS, THREADS, TPI, Metric, ratio, typical
from benchmarks.support.adapters import kernel_row, output
from benchmarks.support.engines import Spec, engines, take_turns
from benchmarks.support.models import olmoe_layers

SHARE = 0.8  # aim, as a share of the dense decode's bytes per second
TIMES_LLAMA = 1.2
ROUNDS, QUICK_ROUNDS, QUICK_WORK = 15, 2, (128, 16)
NOTES = """
Two chains of four blocks take turns, with another token in every round. One has experts in q4 (norm, router, the
experts that the token chose); the other has dense blocks that read as many bytes. Figures are GB/s of the weights that
the token uses. Prompts are in tokens per second of one block. Weights are random, so the figures show the cost of
routing. They do not show how often real routing repeats.

{peers}
"""
PEERS = """
Against llama.cpp: both read one GGUF file of {model} with random weights, without loss. Each engine has a process of
its own, {threads} threads and the same token ids, and chooses greedily. Decode follows a prompt of 128 tokens. A ratio
is the median of the ratios of each round, against the better of llama.cpp's two attention settings. {about}
"""
ALONE = "llama-cpp-python is not installed, so that nothing is compared with llama.cpp."


def bench(quick: bool) -> Result:
    """Run `benchmarks.speed.experts`, then both engines in turn."""
    made: dict[str, Any] = json.loads(output("benchmarks.speed.experts", "--json", "--rounds", "4" if quick else "20"))
    decode = {row["name"]: row["value"] for row in made["decode"]}
    shapes = list(dict.fromkeys(name.rpartition(" ")[0] for name in decode))
    checks = [
        Check(f"{shape}: routed bytes per second, of the dense decode's",
              decode[f"{shape} experts"] / decode[f"{shape} dense"], SHARE)
        for shape in shapes
    ]  # fmt: skip
    tables = [Table(title, [kernel_row(row) for row in rows]) for title, rows in made.items()]
    if find_spec("llama_cpp") is None:
        return Result("Experts in memory", NOTES.format(peers=ALONE), tables, checks)
    notes, table, check = beside_llama(quick)
    return Result("Experts in memory", NOTES.format(peers=notes), [*tables, table], [*checks, check])


def beside_llama(quick: bool) -> tuple[str, Table, Check]:
    """Compare TPI with llama.cpp.

    Returns a description of both, a table of tokens per second, and a check of TPI's speed over the better llama.cpp's.
    """
    model, work = olmoe_layers(), QUICK_WORK if quick else SHORT
    specs = {name: Spec(SPECS[name].kind, str(model.path), THREADS, flash=SPECS[name].flash)
             for name in (TPI, LLAMA, FLASH)}  # fmt: skip
    metrics = [Metric("prefill", work, lambda turn: turn.prefill), Metric("decode", work, lambda turn: turn.decode)]
    with engines(specs) as running:
        turns = take_turns(running, QUICK_ROUNDS if quick else ROUNDS, [work])
        about = "; ".join(dict.fromkeys(engine.about for engine in list(running.values())[1:]))
    rows: list[Row] = [
        {"engine": name} | {metric.name: round(typical(turns, name, metric), 1) for metric in metrics} for name in specs
    ]
    decode = metrics[-1]
    gain = min(ratio(turns, LLAMA, decode), ratio(turns, FLASH, decode))
    notes = PEERS.strip().format(model=model.name, threads=THREADS, about=about)
    return (
        notes,
        Table(f"{model.name}, tokens/s", rows),
        Check(f"{model.name}: decode, times llama.cpp", gain, TIMES_LLAMA),
    )
