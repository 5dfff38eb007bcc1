"""A plan as tables and sentences: where weights are, the forecast, the reasons, and what would help."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields

from master.planning.batch import BatchReport
from master.planning.home.batch import GroupBatchReport
from master.planning.reasons import reasons
from master.planning.report import KINDS, PlanReport, numbered
from master.planning.shapes import weight_bytes
from master.reporting.report import figures_table, wide_console
from scheduler.model.machine import Accelerator, NodeMachine
from scheduler.model.offload.forecast import PhaseForecast
from scheduler.model.offload.memory import MemoryParts
from scheduler.model.offload.work import PLACES, TIERS, Tier, kv_pages
from tpi.text import short_number

_GIB, _MIB = float(1 << 30), float(1 << 20)
_GIGA = 1e9
_KINDS = {"attention": "attention", "ffn": "feed-forward"}
_TIERS: dict[Tier, str] = {"gpu": "GPU", "ram": "RAM", "disk": "disk"}
_LYING = {"ram": "RAM", "disk": "disk"}
_PLACES = {"host": "CPU", "accelerator": "GPU"}
_LANES = {
    "disk": "disk", "up": "link up", "down": "link down", "accelerator": "GPU", "host": "CPU", "bus": "RAM's bus",
}  # fmt: skip
_HELPS = 1.01  # smallest speed-up that is printed
_NAMED = 4  # limit of speed-ups that are printed
_SHOWN = 0.005  # smallest busy part of the time for which a lane is printed


def print_plan(report: PlanReport) -> None:
    """Print the tables and the sentences on stdout."""
    console = wide_console(stderr=False)
    tiers = TIERS if report.problem.machine.accelerator else TIERS[1:]
    for line in _heading(report):
        console.say(line)
    lying = [_TIERS[tier] for tier in tiers]
    console.print(figures_table("what", *lying, "a token", "a prompt", rows=list(_segments(report, tiers))))
    names = [*_numbered(report), _TIERS["ram"]]
    console.print(figures_table("memory", *names, rows=list(_memories(report))))
    for line in (*_speeds(report), *_advice(report)):
        console.say(line)


def print_batch(report: BatchReport | GroupBatchReport) -> None:
    """Print sentences that say how the requests are batched."""
    console = wide_console(stderr=False)
    for line in report.lines():
        console.say(line)


def _heading(report: PlanReport) -> Iterator[str]:
    shape, problem = report.shape, report.problem
    kv = _size(kv_pages(problem.work, problem.request))
    yield (
        f"{shape.name} in {shape.dtype}: {shape.config.layers} layers, {_size(weight_bytes(shape))} of weights, "
        f"{kv} of keys and values for {problem.request.sequences} x {problem.request.context} tokens"
    )
    if (mixture := shape.config.mixture) is not None:
        read = _size(round(problem.work.touched(1)))
        yield f"a token passes {mixture.used} of {mixture.experts} experts of a layer, and reads {read} of weights"
    yield f"{_machine(problem.machine)}; {report.node.origin}"


def _machine(machine: NodeMachine) -> str:
    disk = f"disk {machine.disk.read / _GIGA:.1f} GB/s"
    host = f"{_size(machine.memory)} of RAM at {machine.host.read / _GIGA:.0f} GB/s, {disk}"
    return "; ".join([*map(_card, machine.cards), host])


def _card(device: Accelerator) -> str:
    speeds = f"{device.rates.read / _GIGA:.0f} GB/s, link {device.link.up / _GIGA:.1f} GB/s"
    return f"GPU {_size(device.memory)} at {speeds}"


def _numbered(report: PlanReport) -> list[str]:
    count = len(report.peaks.cards) if report.problem.machine.cards else 0
    return [numbered(_TIERS["gpu"], number) for number in range(1, count + 1)]


def _segments(report: PlanReport, tiers: Sequence[Tier]) -> Iterator[tuple[str, ...]]:
    """Yield table rows with the segments in each memory tier, their size, and the devices that compute them."""
    for kind in KINDS:
        lying, computed = report.lying(kind), report.computed(kind)
        cells = [f"{lying[tier][0]}: {_size(lying[tier][1])}" if lying[tier][0] else "-" for tier in tiers]
        yield _KINDS[kind], *cells, _where(computed["decode"]), _where(computed["prompt"])
    head, offload = report.problem.work.head.nbytes, report.chosen.offload
    place = "GPU" if offload.head == "gpu" else "CPU"
    yield "head", *(_size(head) if tier == offload.head else "-" for tier in tiers), place, place


def _where(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{_PLACES[place]} {counts[place]}" for place in PLACES if counts[place]) or "-"


def _memories(report: PlanReport) -> Iterator[tuple[str, ...]]:
    """Yield table rows with the parts of each memory, their sum, and the limit."""
    cards, host = report.problem.machine.cards, report.peaks.host
    parts = [*(report.peaks.cards if cards else ()), host]
    for part in fields(MemoryParts):
        yield part.name, *(_size(getattr(each, part.name)) for each in parts)
    yield "in all", *(_size(each.total) for each in parts)
    limits = [card.memory for card in cards[: len(parts) - 1]]
    yield "of", *(_size(size) for size in [*limits, report.problem.machine.memory])


def _speeds(report: PlanReport) -> Iterator[str]:
    ahead, request = report.forecast, report.problem.request
    yield (
        f"{short_number(ahead.decode.rate)} tok/s, prompts {short_number(ahead.prompt.rate)} tok/s; "
        f"the first token of {request.prompt} after {short_number(ahead.ttft)} s; "
        f"pipeline {report.chosen.offload.pipeline}"
    )
    yield f"busy with tokens: {_use(ahead.decode)}"
    yield f"busy with prompts: {_use(ahead.prompt)}"
    for tier, tokens in report.crossovers.items():
        steps = f"steps of {tokens} tokens and more" if tokens and tokens > 1 else "any step" if tokens else "no step"
        yield f"moving weights from {_LYING[tier]} to the GPU is faster for {steps}"


def _advice(report: PlanReport) -> Iterator[str]:
    yield from _dealing(report)
    if report.experts is not None:
        yield from report.experts.lines()
        return
    yield from reasons(report.problem, report.chosen)
    helping = [gain for gain in report.gains if gain.faster > _HELPS]
    told = ", ".join(f"{gain.times:g}x {gain.thing} {gain.faster:.2f}x as fast" for gain in helping[:_NAMED])
    yield f"what would help most: {told}" if told else "twice as much of any one thing would not help"


def _dealing(report: PlanReport) -> Iterator[str]:
    """Yield a sentence with each accelerator's number of segments, if there are several accelerators."""
    cards = Counter(report.chosen.offload.cards)
    if cards:
        names = [f"{numbered(_TIERS['gpu'], card + 1)} has {count}" for card, count in sorted(cards.items())]
        yield f"of {cards.total()} segments {', '.join(names)}"


def _use(phase: PhaseForecast) -> str:
    """Return the busy devices and links as text, the busiest (the bottleneck) first."""
    busy = sorted(phase.use.items(), key=lambda item: -item[1])
    return ", ".join(f"{_lane(lane)} {100 * part:.0f}%" for lane, part in busy if part >= _SHOWN)


def _lane(lane: str) -> str:
    name, _, number = lane.partition(" ")
    return f"{_LANES[name]} {number}".rstrip()


def _size(size: float) -> str:
    return f"{size / _GIB:.2f} GiB" if size >= _GIB else f"{size / _MIB:.0f} MiB"
