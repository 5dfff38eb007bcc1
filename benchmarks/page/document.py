"""docs/benchmarks.md and its plots, rendered from the results that are saved.

Figures are stored only in the JSON files.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.page.choices import CHOICES
from benchmarks.page.markdown import table
from benchmarks.page.summary import summary
from benchmarks.page.typical import shown, spread, typical
from benchmarks.registry import BENCHMARKS
from benchmarks.result import Bars, Cell, Check, History, Result, Row, Run
from benchmarks.support.code import changes_since, digest

QUIET = 0.05  # share of the processors' time that an idle system uses
HEADER = """# Benchmarks

`make bench` measures everything and writes this page. The command in a section measures that section alone. Contenders
that are compared take turns in one run, so that other load on the machine affects all of them alike. Figures are
medians, and ratios are medians of the ratios of each turn, unless the section says otherwise.

`benchmarks/results/` holds the last 20 runs of each benchmark, with commit and machine. A section shows the medians of
all runs of the present code on one machine. If the measured code has changed since, the section shows the last run and
says so.
"""


@dataclass(frozen=True)
class Section:
    """A section of the page: the runs of one benchmark, and their figures as one result."""

    name: str
    runs: Sequence[Run]
    result: Result
    age: str  # a sentence on the age of the figures; empty if they are of the present code

    @classmethod
    def of(cls, history: History) -> "Section":
        """Return the section for the runs in `history`."""
        measures = BENCHMARKS[history.name].measures
        runs = shown(history.runs, digest(measures))
        return cls(history.name, runs, typical(runs), _age(runs[-1], measures))


def write_document(histories: Iterable[History], docs: Path) -> None:
    """Write `benchmarks.md` and one SVG per plot into `docs`."""
    sections = [Section.of(history) for history in histories if history.runs]
    if find_spec("matplotlib") is None:
        print("matplotlib is not installed: the plots stay as they are", file=sys.stderr)
    else:
        for one in sections:
            for number, plot in enumerate(one.result.plots):
                draw(plot, docs / _plot_name(one.name, number))
    pages = [HEADER, summary([(one.result, one.age) for one in sections]), *map(markdown, sections), CHOICES]
    docs.joinpath("benchmarks.md").write_text("\n".join(pages))


def markdown(section: Section) -> str:
    """Render one benchmark as Markdown."""
    result, last = section.result, section.runs[-1]
    lines = [f"## {result.title}", "", _made(section, last), ""]
    lines += [f"**{mark}**\n" for mark in (section.age, _disturbance(section)) if mark]
    lines += [result.notes.strip(), ""]
    if result.checks:
        lines += [*_checks(result.checks, section.runs), ""]
    for number, plot in enumerate(result.plots):
        lines += [f"![{plot.title}]({_plot_name(section.name, number)})", ""]
    for one in result.tables:
        lines += [*([f"**{one.title}**", ""] if one.title else []), *table(one.rows), ""]
    return "\n".join(lines)


def _made(section: Section, last: Run) -> str:
    """Return a line with the command, the machine, the date and the commit of the figures."""
    many = f" · medians of {len(section.runs)} runs" if len(section.runs) > 1 else ""
    commit = last.commit or "commit not recorded"
    return f"`python -m benchmarks {section.name}` · {last.machine} · {last.date} · {commit}{many}"


def _age(run: Run, measures: Sequence[str]) -> str:
    """Return a sentence on how old the figures are, or an empty string if the code is still as `run` measured it."""
    if not run.code:
        return "Measured before commits were recorded, so the code of these figures is not known."
    if run.code == digest(measures):
        return ""
    count = changes_since(run.commit, measures)
    since = f" by {count} commit{'s' * (count != 1)}" if count else ""
    return f"Older than the code that it measures: the code has been changed{since} since {run.commit or 'then'}."


def draw(plot: Bars, path: Path) -> None:
    """Draw one small axis per group, side by side, so that groups of different size can be read."""
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


def _disturbance(section: Section) -> str:
    share = max(run.disturbance for run in section.runs)
    if share < QUIET or not section.result.timed:
        return ""
    return f"The machine was not quiet: other processes used {share:.0%} of the processors. Measure again."


def _plot_name(name: str, number: int) -> str:
    return f"benchmarks-{name}{f'-{number + 1}' if number else ''}.svg"


def _checks(checks: Sequence[Check], runs: Sequence[Run]) -> list[str]:
    rows: list[Row] = []
    for check in checks:
        row: dict[str, Cell] = {"promise": check.claim, "": check.limit, "bound": check.bound, "measured": check.value}
        if len(runs) > 1:
            least, most = spread(runs, check.claim)
            row["of all runs"] = f"{least:.3g} to {most:.3g}"
        rows.append(row | {"kept": "yes" if check.kept else "**no**"})
    return table(rows)
