"""What a benchmark hands back: tables, checks against what was promised, perhaps a plot; and its JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Cell = str | int | float
Row = Mapping[str, Cell]


@dataclass(frozen=True)
class Table:
    """Rows under a title; the first row's keys are the columns."""

    title: str
    rows: Sequence[Row]


@dataclass(frozen=True)
class Check:
    """One promise: `value` must be at least `bound`, or at most where `at_most`."""

    claim: str
    value: float
    bound: float
    at_most: bool = False

    @property
    def kept(self) -> bool:
        """Whether the promise holds."""
        return self.value <= self.bound if self.at_most else self.value >= self.bound


@dataclass(frozen=True)
class Bars:
    """A plot of grouped bars: `series[name][i]` belongs to `groups[i]`; each group has a scale (an axis) of its own."""

    title: str
    unit: str
    groups: Sequence[str]
    series: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Result:
    """The section of one benchmark.

    `notes` is Markdown: what was measured, and how. `timed` says that figures depend on how busy the machine is.
    """

    title: str
    notes: str
    tables: Sequence[Table]
    checks: Sequence[Check] = ()
    plots: Sequence[Bars] = ()
    timed: bool = True


@dataclass(frozen=True)
class Run:
    """A result with where and when it was made."""

    name: str
    machine: str
    date: str
    disturbance: float  # share of the processors' time that other processes took meanwhile
    result: Result

    def save(self, folder: Path) -> None:
        """Write `<folder>/<name>.json`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.json").write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Run":
        """Inverse of `save`."""
        fields: dict[str, Any] = json.loads(path.read_text())
        result = fields.pop("result")
        for key, kind in (("tables", Table), ("checks", Check), ("plots", Bars)):
            result[key] = [kind(**item) for item in result[key]]
        return cls(**fields, result=Result(**result))
