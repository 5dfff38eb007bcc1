"""Tables in Markdown."""

from collections.abc import Sequence

from benchmarks.result import Cell, Row


def table(rows: Sequence[Row]) -> list[str]:
    """Render rows as the lines of a table; the first row's keys are the columns."""
    columns = list(rows[0]) if rows else []
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(cell(row[column]) for column in columns) + " |" for row in rows]


def cell(value: Cell) -> str:
    """Format a number with three significant digits, or all digits of its whole part if that has more."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
