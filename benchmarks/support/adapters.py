"""Results of the benchmarks that are programs of their own, from the JSON that they write."""

import json
import subprocess
import sys
from typing import Any

from benchmarks.result import Bars, Check, Result, Row, Table

BANDWIDTH_SHARE = 0.75
KERNEL_NOTES = """
Native kernels, {isa}, {threads} threads. All cases take turns. The weights of matrix-vector products rotate over 512
MiB, so that no CPU cache holds them, and are compared with plain reading of the same memory in the same run. Figures
are the median of the rounds; `best` is the fastest round.
"""
ALLREDUCE_NOTES = """
One process per node on this machine, without spinning; all contenders take turns. The raw TCP star has no framing, no
fencing and no deadlines. Figures are microseconds per exchange as measured by the master, and the ratio to the TCP
star. On one machine the cost of a sum is copies and wake-ups, not latency, so a mesh is not faster here.
"""


def kernels(quick: bool) -> Result:
    """Run `benchmarks.speed.kernels` and check its figures."""
    made: dict[str, Any] = json.loads(output("benchmarks.speed.kernels", "--json", "--rounds", "3" if quick else "20"))
    products = made["tables"]["matrix-vector"]
    read = products[0]["value"]
    checks = [
        Check(f"{row['name']}, share of the read bandwidth", row["value"] / read, BANDWIDTH_SHARE)
        for row in products[1:] if row["name"].startswith("q")
    ]  # fmt: skip
    sparse = {row["name"]: row["value"] for row in made["tables"]["sparse FFN"]}
    bounds = {"100% active": ("dense pack", 1.5), "10% active": ("all active", 0.15), "1% active": ("all active", 0.04)}
    checks += [
        Check(f"sparse FFN 4096x11008 q4, {name}: time, times {base}", sparse[name], bound, at_most=True)
        for name, (base, bound) in bounds.items()
    ]
    tables = [Table(title, [kernel_row(row) for row in rows]) for title, rows in made["tables"].items()]
    notes = KERNEL_NOTES.format(isa=made["isa"], threads=made["threads"])
    return Result("Kernels", notes, tables, checks, [_bandwidths(products)])


def allreduce(quick: bool) -> Result:
    """Run `benchmarks.network.allreduce` and check its figures."""
    rounds = "3" if quick else "31"
    made: list[dict[str, Any]] = json.loads(
        output("benchmarks.network.allreduce", "--rounds", rounds, "--json", "/dev/stdout")
    )
    tables, checks = [], []
    for report in made:
        columns = [f"{payload / 1000:.1f} kB" for payload in report["payloads"]]
        base = report["medians"]["tcp-star"]
        tables.append(Table(f"{report['nodes']} nodes, microseconds (times the TCP star)", [
            _sync_row(name, columns, seconds, base) for name, seconds in report["medians"].items()
        ]))  # fmt: skip
        if report["nodes"] == 4:
            at = report["payloads"].index(16384)
            checks += [
                Check(f"{name}, 3 workers, 16 kB: times the TCP star", report["medians"][name][at] / base[at], 3.0,
                      at_most=True) for name in ("star", "mesh")
            ]  # fmt: skip
    return Result("Collectives on one machine", ALLREDUCE_NOTES, tables, checks)


def output(module: str, *arguments: str) -> str:
    """Return the output of a benchmark, or only its JSON document if other output precedes it."""
    done = subprocess.run([sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout[done.stdout.index("\n[") :] if not done.stdout.startswith("{") else done.stdout


def _bandwidths(products: list[dict[str, Any]]) -> Bars:
    """Return a plot of every quantised format next to plain reading, with one group of bars for each shape."""
    by_name = {row["name"]: float(row["value"]) for row in products}
    cases = [name.split() for name in by_name if name.startswith("q")]
    formats, shapes = (list(dict.fromkeys(case[i] for case in cases)) for i in (0, 1))
    series = {"read": [by_name["read"]] * len(shapes)}
    series |= {format: [by_name[f"{format} {shape}"] for shape in shapes] for format in formats}
    return Bars("Matrix-vector products against plain reading", "GB/s", shapes, series)


def kernel_row(row: dict[str, Any]) -> Row:
    """Convert a figure of `benchmarks.speed.kernels` to a row of a table."""
    return {"case": row["name"], "median": float(row["value"]), "best": float(row["best"]), "unit": row["unit"]}


def _sync_row(name: str, columns: list[str], seconds: list[float], base: list[float]) -> Row:
    cells = [f"{own * 1e6:.0f} ({own / other:.2f})" for own, other in zip(seconds, base, strict=True)]
    return {"collective": name} | dict(zip(columns, cells, strict=True))
