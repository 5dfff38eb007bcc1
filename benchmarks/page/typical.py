"""Several runs of one benchmark as one: every figure is the median of all runs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from benchmarks.result import Bars, Cell, Check, Result, Row, Run, Table

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def shown(runs: Sequence[Run], code: str) -> list[Run]:
    """Return the runs that the page shows.

    These are all runs of the present code (whose digest is `code`) on the machine of the last such run. If no run has
    this code, only the last run is shown.
    """
    present = [run for run in runs if run.code and run.code == code]
    last = (present or runs)[-1]
    return [run for run in present if run.machine == last.machine] or [last]


def typical(runs: Sequence[Run]) -> Result:
    """Return the result of the last run, with medians in place of its figures.

    The medians are over all runs that have the same tables, checks and plots.
    """
    last = runs[-1].result
    alike = [run.result for run in runs if _shape(run.result) == _shape(last)]
    return replace(
        last,
        tables=[_table([result.tables[at] for result in alike]) for at in range(len(last.tables))],
        checks=[_check([result.checks[at] for result in alike]) for at in range(len(last.checks))],
        plots=[_bars([result.plots[at] for result in alike]) for at in range(len(last.plots))],
    )


def spread(runs: Sequence[Run], claim: str) -> tuple[float, float]:
    """Return the least and the largest value of one promise in all runs."""
    values = [check.value for run in runs for check in run.result.checks if check.claim == claim]
    return min(values), max(values)


def _shape(result: Result) -> object:
    tables = [(table.title, [tuple(row) for row in table.rows]) for table in result.tables]
    plots = [(plot.title, tuple(plot.groups), tuple(plot.series)) for plot in result.plots]
    return tables, [check.claim for check in result.checks], plots


def _table(tables: Sequence[Table]) -> Table:
    rows = zip(*(table.rows for table in tables), strict=True)
    return Table(tables[-1].title, [_row(same) for same in rows])


def _row(rows: Sequence[Row]) -> Row:
    return {column: _cell([row[column] for row in rows]) for column in rows[-1]}


def _cell(cells: Sequence[Cell]) -> Cell:
    """Return the median of the cells of one place in the tables of several runs.

    In texts that differ only in numbers, each number becomes its median. Of other texts, the last one is returned.
    """
    last = cells[-1]
    if isinstance(last, str):
        texts = [str(cell) for cell in cells if _NUMBER.sub("#", str(cell)) == _NUMBER.sub("#", last)]
        columns = zip(*(_NUMBER.findall(text) for text in texts), strict=True)
        medians = iter([f"{median(map(float, column)):.{_places(column[-1])}f}" for column in columns])
        return _NUMBER.sub(lambda _: next(medians), last)
    return median(cell for cell in cells if not isinstance(cell, str))


def _places(number: str) -> int:
    return len(number.partition(".")[2])


def _check(checks: Sequence[Check]) -> Check:
    return replace(checks[-1], value=median(check.value for check in checks))


def _bars(plots: Sequence[Bars]) -> Bars:
    series: Mapping[str, Sequence[float]] = {
        name: [median(values) for values in zip(*(plot.series[name] for plot in plots), strict=True)]
        for name in plots[-1].series
    }
    return replace(plots[-1], series=series)
