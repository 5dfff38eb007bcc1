"""Six homes: the planner's choice in each against layouts by hand, with predicted and measured times side by side."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.network.awake import awake
from benchmarks.network.forecast import AUTO, task
from benchmarks.network.home import Home, home
from benchmarks.result import Check, Result, Row, Table
from benchmarks.support.models import llama_1b
from tpi.partition import deal
from tpi.topology.schema import load_topology
from tpi.topology.topology import Topology

HOMES = ("home-wired", "home-wifi", "home-pairs", "home-far", "home-uneven", "home-slow-disks")
PAIRED = "home-pairs"
MASTER_MEMORY = 1 << 30  # bytes; enough for the model
SMALL_MEMORY = 200 << 20  # if a home limits its devices' memory: a tenth of the layers, the embedding and the head
LAYERS = 22
CONTEXT = 256
TURNS, TOKENS = 2, 8
WITHIN, LOSS = 0.15, 1.1
BENCH = (sys.executable, "-m", "tpi.cli", "bench", "--json", "-t", "1", "--repeat", "1", "-c", str(CONTEXT))
NOTES = f"""
The 1.1B Llama shape in Q4_0 in the six homes that ship with TPI ([testbed.md](testbed.md#topology-files)), on devices
of 0.1 to 0.4 core. Only with slow disks, devices cannot hold their quarter of the layers in memory. *One stage* is
tensor parallelism over all nodes, *one node a stage* has layers in proportion to the cores, *pairs* are the wired pairs
as two stages, and *auto* is what TPI chooses. The layouts take turns on the same workers; a figure is the faster of
{TURNS} turns of {TOKENS} tokens, because other programs only add time. *Predicted* is the planner's forecast on the
first device, from the speeds that the workers measured and the links between all nodes. It is made after the layouts by
hand had their first turn.
"""

Stages = Sequence[tuple[int, int, Sequence[int]]]


@awake()
def bench(quick: bool) -> Result:
    """Measure all layouts in all homes."""
    rows, parts, checks = list[Row](), list[Row](), list[Check]()
    for name in HOMES:
        measured, predicted = _measure(load_topology(name), 1 if quick else TURNS)
        best = min(measured.values(), key=lambda each: each["seconds"])["seconds"]
        for layout, found in measured.items():
            ahead = predicted.get(layout)
            rows.append(_row(name, layout, ahead, found))
            parts.append(_parts(name, layout, ahead, found))
        off = abs(predicted[AUTO]["seconds"] / measured[AUTO]["seconds"] - 1)
        checks.append(Check(f"{name}: the choice over the best", measured[AUTO]["seconds"] / best, LOSS, at_most=True))
        checks.append(Check(f"{name}: the choice's prediction is off by", off, WITHIN, at_most=True))
    tables = [Table("Milliseconds per token", rows), Table("Parts of a token, in milliseconds", parts)]
    return Result("Homes: chosen layouts", NOTES, tables, checks)


def _layouts(topology: Topology) -> dict[str, tuple[Sequence[str], Stages]]:
    """Return the flags of `tpi bench`, and the stages, of each layout by hand."""
    cores = [device.cpu or 1.0 for device in topology.devices]
    everyone = tuple(range(len(cores)))
    singles = [(part.first, part.last, (rank,)) for rank, part in enumerate(deal(LAYERS, cores))]
    split = ",".join(f"{share:g}" for share in cores)
    found: dict[str, tuple[Sequence[str], Stages]] = {
        "one stage": (("--stages", "1", "--split", split), [(0, LAYERS, everyone)]),
        "one node a stage": (("--stages", str(len(cores)), "--split", split), singles),
    }
    if topology.name == PAIRED:
        names = ["master", *(device.name for device in topology.devices[1:])]
        pairs = ",".join(f"{first}-{last - 1}:{names[a]}+{names[b]}" for first, last, (a, b) in _PAIRS)
        found["pairs"] = (("--stages", pairs), _PAIRS)
    return found


_PAIRS = [(0, LAYERS // 2, (0, 1)), (LAYERS // 2, LAYERS, (2, 3))]


def _measure(topology: Topology, turns: int) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return the measured and the predicted figures of each layout, by its name. The layouts take turns."""
    model, by_hand = str(llama_1b().path), _layouts(topology)
    memory = SMALL_MEMORY if topology.devices[0].memory else MASTER_MEMORY
    with home(topology) as place:
        stages = {name: layout for name, (_, layout) in by_hand.items()}
        ways = {name: (*flags, "--workers", place.addresses) for name, (flags, _) in by_hand.items()}
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in (*ways, AUTO)}
        predicted: dict[str, dict[str, Any]] = {}
        for _ in range(turns):
            for name, flags in ways.items():
                runs[name].append(_run(place, model, memory, flags))
            predicted = predicted or _forecast(place, model, memory, stages)
            runs[AUTO].append(_run(place, model, memory, ("--stages", AUTO)))
    return {name: min(each, key=lambda run: float(run["seconds"])) for name, each in runs.items()}, predicted


def _forecast(place: Home, model: str, memory: int, layouts: Mapping[str, Stages]) -> dict[str, dict[str, Any]]:
    asked = task(model, memory, CONTEXT, dict(layouts))
    printed = place.run([sys.executable, "-m", "benchmarks.network.forecast", asked])
    found: dict[str, dict[str, Any]] = json.loads(printed.splitlines()[-1])
    return found


def _run(place: Home, model: str, memory: int, flags: Sequence[str]) -> dict[str, Any]:
    """Return the seconds of a token and of its parts. The slowest node of a stage counts for the stage."""
    work = ("--memory", f"{memory}B", "--prompt-tokens", "4", "--gen-tokens", str(TOKENS))
    said = json.loads(place.run([*BENCH, "-m", model, *work, *flags]).splitlines()[-1])
    seconds = 1 / said["decode_tokens_per_s"]
    groups: dict[tuple[tuple[int, int], ...], list[dict[str, Any]]] = {}
    for node in said["nodes"]:
        groups.setdefault(tuple((first, last) for first, last in node["layers"]), []).append(node)
    compute, disk = (
        sum(max(node[field] for node in nodes) for nodes in groups.values()) / 1e3
        for field in ("compute_ms_per_token", "io_stall_ms_per_token")
    )
    parts = {"compute": compute, "sums and hops": seconds - compute - disk, "disk": disk}
    stages = [
        f"{first}-{last - 1}:{'+'.join(node['name'] for node in nodes)}"
        for layers, nodes in sorted(groups.items())
        for first, last in layers
    ]
    return {"seconds": seconds, "parts": parts, "stages": ", ".join(stages)}


def _row(name: str, layout: str, ahead: dict[str, Any] | None, found: dict[str, Any]) -> Row:
    return {
        "home": name,
        "layout": layout,
        "stages": found["stages"],
        "predicted": 1e3 * ahead["seconds"] if ahead else "does not fit",
        "measured": 1e3 * found["seconds"],
        "predicted over measured": ahead["seconds"] / found["seconds"] if ahead else "-",
    }


def _parts(name: str, layout: str, ahead: dict[str, Any] | None, found: dict[str, Any]) -> Row:
    row: dict[str, str | float] = {"home": name, "layout": layout}
    for part, seconds in found["parts"].items():
        row[f"{part}, predicted"] = 1e3 * ahead["parts"][part] if ahead else "-"
        row[f"{part}, measured"] = 1e3 * seconds
    return row
