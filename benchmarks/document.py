"""docs/benchmarks.md and its plots, rendered from the results that are saved. Figures live in the JSON files alone."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.result import Bars, Cell, Check, Run, Table

QUIET = 0.05  # of the processors' time: what a system takes for itself
HEADER = """# Benchmarks

Made by `make bench`, or one section alone by the command that stands in it. Contenders that are compared take turns
in one run, so that what else the machine does hits all alike; figures are medians, ratios are medians of the ratios
of each turn, unless the section says otherwise. This page is rendered from `benchmarks/results/`; a section stays as it
is until its benchmark runs again, on the machine that it names.
"""


def write_document(runs: Sequence[Run], docs: Path) -> None:
    """Write `benchmarks.md` and one SVG per plot into `docs`."""
    for run in runs:
        for number, plot in enumerate(run.result.plots):
            draw(plot, docs / _plot_name(run, number))
    docs.joinpath("benchmarks.md").write_text("\n".join([HEADER, *map(section, runs)]))


def section(run: Run) -> str:
    """The Markdown of one benchmark."""
    result = run.result
    where = f"`python -m benchmarks {run.name}` · {run.machine} · {run.date}"
    lines = [
        f"## {result.title}",
        "",
        where,
        "",
        *(_disturbance(run.disturbance) if result.timed else []),
        result.notes.strip(),
        "",
    ]
    if result.checks:
        lines += [*_checks(result.checks), ""]
    for number, plot in enumerate(result.plots):
        lines += [f"![{plot.title}]({_plot_name(run, number)})", ""]
    for table in result.tables:
        lines += [f"**{table.title}**", "", *_table(table), ""]
    return "\n".join(lines)


def draw(plot: Bars, path: Path) -> None:
    """One small axis per group, side by side, so that groups of different size can be read."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["svg.hashsalt"] = path.stem  # the same figures give the same file
    figure = Figure(figsize=(2.1 * len(plot.groups) + 0.6, 3.2), layout="constrained")
    for group, axis in enumerate(figure.subplots(1, len(plot.groups), squeeze=False)[0]):
        for position, values in enumerate(plot.series.values()):
            bars = axis.bar(position, values[group], color=f"C{position}")
            axis.bar_label(bars, fmt="%.3g", fontsize=8)
        axis.set_title(plot.groups[group], fontsize=9)
        axis.set_xticks([])
        axis.spines[["top", "right"]].set_visible(False)
    figure.supylabel(plot.unit, fontsize=9)
    handles = [axis.patches[position] for position in range(len(plot.series))]
    figure.legend(handles, list(plot.series), loc="outside lower center", ncols=len(plot.series), frameon=False)
    figure.suptitle(plot.title, fontsize=10)
    figure.savefig(path, metadata={"Date": None})


def _disturbance(share: float) -> list[str]:
    if share < QUIET:
        return []
    return [f"**Not quiet: other processes took {share:.0%} of the processors meanwhile. Measure again.**", ""]


def _plot_name(run: Run, number: int) -> str:
    return f"benchmarks-{run.name}{f'-{number + 1}' if number else ''}.svg"


def _checks(checks: Iterable[Check]) -> list[str]:
    rows = [
        {
            "promise": check.claim,
            "": "at most" if check.at_most else "at least",
            "bound": check.bound,
            "measured": check.value,
            "kept": "yes" if check.kept else "**no**",
        }
        for check in checks
    ]
    return _table(Table("", rows))


def _table(table: Table) -> list[str]:
    columns = list(table.rows[0]) if table.rows else []
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(_cell(row[column]) for column in columns) + " |" for row in table.rows]


def _cell(value: Cell) -> str:
    """Three significant digits, but never fewer than a whole number has."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
