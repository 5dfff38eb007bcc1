"""Schedules on the emulated accelerator: speed relative to the bound, and gain over FlexGen's schedule."""

from dataclasses import dataclass

from benchmarks.offloading.emulated import EmulatedNode, StepTime, emulated_node
from benchmarks.offloading.flexgen import synchronise
from benchmarks.result import Bars, Check, Result, Row, Table
from benchmarks.support.models import llama_1b
from tpi.devices.options import OffloadOptions
from tpi.devices.pages import round_up

LINKS = (2, 4, 8, 12, 24)  # GB/s
MEMORY = 8  # GB/s of the accelerator: computing a token takes as long as a link of that speed
PROMPT, STEPS, ROUNDS = 32, 4, 3
STREAM = {
    "performance": OffloadOptions("ram", "gpu", "performance", 1),
    "memory": OffloadOptions("ram", "gpu", "memory", 1),
}
BOUND, GAIN, BUSY = 0.92, 0.9, 0.9
NOTES = f"""
A 1.1B Llama shape in 4 bits. All weights are in RAM and are streamed to an emulated accelerator for each token; keys
and values are on the accelerator. The accelerator reads its memory at {MEMORY} GB/s. With faster links computing is the
bound; with slower links streaming is. Figures are milliseconds of the emulated machine, medians of {ROUNDS} rounds,
interleaved: **they judge schedules, never kernels**. `bound` is the busiest lane of the run. FlexGen's schedule makes
the same loads, but synchronises the device and all transfers after every block. `allowed` is the gain over it according
to the exact timeline of both; `gain` is the measured one. `overran` counts the tasks whose real computing took more
than half of their slot; if there are many, the machine was too busy for the row. If computing is the bound, the
missing time is the host's. It computes the norm and rounds the input of every block, adds the residual, and computes
the head. Each of these calls takes at least 100 us in the emulation, during which nothing else can run.
"""


@dataclass(frozen=True)
class Point:
    """One link speed: a step in each schedule."""

    link: float
    steps: dict[str, StepTime]
    allowed: float  # gain over FlexGen that the timeline allows


def bench(quick: bool) -> Result:
    """Measure both schedules on a grid of link speeds."""
    model = str(llama_1b().path)
    points = [_point(model, link, 1 if quick else ROUNDS) for link in (LINKS[1::3] if quick else LINKS)]
    best = [point.steps["performance"] for point in points]
    reached = min(step.busiest / step.seconds for step in best)
    gains = [_gain(point) / point.allowed for point in points]
    bound_by_computing = [step.use["compute"] for point, step in zip(points, best, strict=True) if point.link > MEMORY]
    checks = [
        Check("throughput over the bound, the least of the grid", reached, BOUND),
        Check("gain over FlexGen's schedule, of what the timeline allows, the least of the grid", min(gains), GAIN),
        Check("accelerator busy where computing is the bound, the least", min(bound_by_computing, default=1.0), BUSY),
    ]
    rows = [_row(point) for point in points]
    names = [f"{point.link:g} GB/s" for point in points]
    speeds = {name: [1 / point.steps[name].seconds for point in points] for name in points[0].steps}
    plot = Bars("Tokens per second by link", "tok/s", names, speeds)
    return Result(
        "Pipelines on the emulated accelerator", NOTES, [Table("Milliseconds per token", rows)], checks, [plot]
    )


def _point(model: str, link: float, rounds: int) -> Point:
    device = f"emu:128MiB,link={link}GB/s,memory={MEMORY}GB/s,flops=0.3TFLOP/s,latency=20us,launch=100us,stretch=16"
    kinds = [("performance", False), ("memory", False), ("performance", True)]
    found: dict[str, list[StepTime]] = {}
    allowed = 1.0
    for _ in range(rounds):
        for pipeline, synchronised in kinds:
            with emulated_node(model, device, STREAM[pipeline]) as node:
                if synchronised:
                    synchronise(node.session.node)
                    allowed = _allowed(node)
                node.prompt(PROMPT)
                node.tokens(1)
                name = "FlexGen's" if synchronised else pipeline
                found.setdefault(name, []).append(node.tokens(STEPS))
    return Point(link, {name: _median(steps) for name, steps in found.items()}, allowed)


def _median(steps: list[StepTime]) -> StepTime:
    return sorted(steps, key=lambda step: step.seconds)[len(steps) // 2]


def _gain(point: Point) -> float:
    return point.steps["FlexGen's"].seconds / point.steps["performance"].seconds


def _allowed(node: EmulatedNode) -> float:
    """Return the time of FlexGen's schedule divided by that of TPI's, on the exact timeline.

    In FlexGen's schedule each block takes its computing time or the next block's load time, whichever is longer.
    """
    machine, plan = node.emulation.machine, node.plan
    sizes = [round_up(plan.pieces[number].nbytes) for number in plan.streamed_pieces]
    loads = [machine.latency + size / machine.up for size in sizes]
    computes = [machine.launch + size / machine.memory for size in sizes]
    synchronised = sum(max(compute, load) for compute, load in zip(computes, loads[1:] + loads[:1], strict=True))
    return synchronised / _overlapped(computes, loads)


def _overlapped(computes: list[float], loads: list[float]) -> float:
    """Return the steady-state seconds of a token with two slots.

    Load n begins when load n - 1 and block n - 2 have ended.
    """
    loaded = ended = before = started = 0.0
    for _ in range(8):
        started = ended
        for compute, load in zip(computes, loads, strict=True):
            loaded = max(loaded, before) + load
            before, ended = ended, max(ended, loaded) + compute
    return ended - started


def _row(point: Point) -> Row:
    best = point.steps["performance"]
    row: dict[str, str | int | float] = {"link GB/s": point.link}
    row |= {name: 1e3 * step.seconds for name, step in point.steps.items()}
    return {
        **row,
        "bound": 1e3 * best.busiest,
        "of the bound": best.busiest / best.seconds,
        "busy": best.use["compute"],
        "link busy": best.use["up"],
        "gain": _gain(point),
        "allowed": point.allowed,
        "overran": sum(step.overruns for step in point.steps.values()),
    }
