"""Star and mesh over emulated links, against a raw TCP star over the same links."""

import subprocess
from typing import Any

from benchmarks.network.allreduce import COMMAND, measure
from benchmarks.network.awake import awake
from benchmarks.network.group_node import BASELINE, Plan
from benchmarks.network.home import MEGABIT, MILLISECOND, verify_patiently, wheel
from benchmarks.result import Check, Result, Row, Table
from testbed.launch import Testbed

SLACK_MS = 0.35
PAYLOADS = (2304, 16384)
NOTES = """
Four devices around a router, 1 Gbit, f32 on the wire. One process per device takes part in all contenders in turn,
without spinning, on processors that are prevented from sleeping (`benchmarks/network/awake.py`). Figures are
milliseconds per exchange as measured by the master: the mean of four exchanges in a row, and the median of these means.
"""


@awake()
def bench(quick: bool) -> Result:
    """Measure links of 1 ms and of 5 ms from end to end."""
    tables, checks = [], []
    for latency in (1, 5):
        medians = _medians(latency * MILLISECOND, 3 if quick else 21)
        tables.append(Table(f"{latency} ms from end to end, milliseconds per exchange", _rows(medians)))
        base = medians[BASELINE][-1]
        checks += [
            Check(f"{latency} ms, 16 kB: additional ms of {name} over TCP", medians[name][-1] - base, SLACK_MS, True)
            for name in ("star", "mesh")
        ]
    return Result("Collectives over links", NOTES, tables, checks)


def _medians(latency: float, rounds: int) -> dict[str, list[float]]:
    plan = Plan((BASELINE, "star", "mesh", "two-shot"), "f32", PAYLOADS, rounds, 5, 0)
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with Testbed.start(wheel(4, latency, 1000 * MEGABIT)) as bed:
        verify_patiently(bed)
        names = [device.name for device in bed.topology.devices]
        hosts = [bed.address(name) for name in names]
        report = measure(plan, hosts, lambda rank: bed.popen(names[rank], COMMAND, **pipes))
    return {name: [1e3 * seconds for seconds in row] for name, row in report["medians"].items()}


def _rows(medians: dict[str, list[float]]) -> list[Row]:
    columns = [f"{payload / 1e3:.1f} kB" for payload in PAYLOADS]
    return [{"collective": name} | dict(zip(columns, row, strict=True)) for name, row in medians.items()]
