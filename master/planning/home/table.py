"""A home's plan as a table and sentences: the nodes' parts, the forecast, nodes left out, and what would help."""

from collections.abc import Iterator

from master.planning.home.compared import ComparedLayouts
from master.planning.home.report import HomeReport
from master.planning.shapes import weight_bytes
from master.reporting.report import figures_table, wide_console
from tpi.text import short_number

_GIB, _MIB, _MS = float(1 << 30), float(1 << 20), 1e3
_HELPS = 1.01  # smallest speed-up that is printed
_NAMED = 4  # limit of speed-ups that are printed
_UNITS = {"heads": "heads", "neurons": "neurons", "experts": "expert", "shared": "shared"}
_SHOWN = 0.005  # smallest part of a token's time that is printed


def print_home(report: HomeReport) -> None:
    """Print the table and the sentences on stdout."""
    console = wide_console(stderr=False)
    shape, home = report.model.shape, report.model.home
    weights = _size(weight_bytes(shape))
    console.say(f"{shape.name} in {shape.dtype}: {shape.config.layers} layers, {weights} of weights")
    count = len(home.names)
    console.say(f"{count} machine{'s' * (count > 1)}: {home.origin}")
    kinds = [_UNITS[kind] for kind in _kinds(report)]
    columns = ("node", "layers", *kinds, "weights", "on disk", "KV", "memory")
    console.print(figures_table(*columns, rows=list(_nodes(report))))
    for line in _sentences(report):
        console.say(line)
    print_layouts(report.compared)


def print_layouts(compared: ComparedLayouts, stderr: bool = False) -> None:
    """Print the table of the layouts that were compared, if there are several, on stdout or `stderr`."""
    rows = list(compared.rows())
    if len(rows) > 1:
        wide_console(stderr).print(figures_table(*compared.columns, rows=rows))


def _kinds(report: HomeReport) -> list[str]:
    return list(dict.fromkeys(kind for stage in report.layout.stages for kind in stage.split.units))


def _nodes(report: HomeReport) -> Iterator[tuple[str, ...]]:
    for member in report.ahead.members:
        memory, machine = member.memory, report.model.home.machines[member.rank]
        held = report.holds(member)
        counts = [str(held.get(kind, "-")) for kind in _kinds(report)]
        disk = _size(member.disk_bytes) if member.disk_bytes else "-"
        sizes = (
            _size(member.weight_bytes),
            disk,
            _size(memory.kv),
            f"{memory.total / _GIB:.2f} of {machine.memory / _GIB:.2f} GiB",
        )
        layers = ", ".join(f"{each.first}-{each.last - 1}" for each in member.layers)
        yield report.name(member), layers, *counts, *sizes


def _sentences(report: HomeReport) -> Iterator[str]:
    ahead, request = report.ahead, report.model.request
    yield (
        f"{short_number(1 / ahead.token)} tok/s, prompts {short_number(ahead.prompt_rate)} tok/s; "
        f"the first token of {request.prompt} after {short_number(ahead.ttft)} s"
    )
    if (many := report.model.streams) > 1:
        yield f"{many} answers at once: {short_number(1 / ahead.streams(many))} tok/s in all"
    parts = ", ".join(f"{what} {short_number(_MS * seconds)} ms" for what, seconds in _shown(report))
    summing = any(len(stage.split.members) > 1 for stage in report.layout.stages)
    alone = len(report.layout.stages) == 1
    waited = f", and the others wait for {report.name(report.slowest)}" if summing and alone else ""
    worst = max(report.parts, key=report.parts.__getitem__)
    yield f"a token: {parts}; most of it is {worst}{waited}"
    if summing:
        yield f"partial results are summed by {report.collective}"
    yield from _left_out(report)
    if report.faster:
        rate, group = short_number(1 / report.faster.seconds), report.compared.words(report.faster)
        yield f"faster without some of them: {rate} tok/s with {group}"
    helping = [gain for gain in report.gains if gain.faster > _HELPS][:_NAMED]
    told = ", ".join(f"{gain.times:g}x {gain.thing} {gain.faster:.2f}x as fast" for gain in helping)
    yield f"what would help most: {told}" if told else "twice as much of any one thing would not help"


def _shown(report: HomeReport) -> list[tuple[str, float]]:
    """Return the parts of a token's time that are at least the share `_SHOWN` of it, with their seconds."""
    return [(what, seconds) for what, seconds in report.parts.items() if seconds > _SHOWN * report.ahead.token]


def _left_out(report: HomeReport) -> Iterator[str]:
    names, all_of_them = ", ".join(report.left_out), report.with_all
    if names and report.asked:
        yield f"in no stage: {names}"
    elif names:
        slower = f"; with all of them {short_number(1 / all_of_them.seconds)} tok/s" if all_of_them else ""
        yield f"left out, because the others are faster without: {names}{slower}"


def _size(size: float) -> str:
    return f"{size / _GIB:.2f} GiB" if size >= _GIB else f"{size / _MIB:.0f} MiB"
