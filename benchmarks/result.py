"""The result of a benchmark (tables, checks against promises, perhaps a plot), and its last runs as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Cell = str | int | float
Row = Mapping[str, Cell]
KEPT_RUNS = 20  # of each benchmark


@dataclass(frozen=True)
class Table:
    """Rows under a title; the first row's keys are the columns."""

    title: str
    rows: Sequence[Row]


@dataclass(frozen=True)
class Check:
    """One promise: `value` must be at least `bound`, at most `bound`, or close to it.

    With `at_most`, it must be at most `bound`. With `within`, it may differ from `bound` by at most that.
    """

    claim: str
    value: float
    bound: float
    at_most: bool = False
    within: float | None = None

    @property
    def kept(self) -> bool:
        """True if the promise holds."""
        if self.within is not None:
            return abs(self.value - self.bound) <= self.within
        return self.value <= self.bound if self.at_most else self.value >= self.bound

    @property
    def limit(self) -> str:
        """The relation between value and bound in words, such as "at least"."""
        if self.within is not None:
            return "exactly" if self.within == 0 else f"within {self.within:g} of"
        return "at most" if self.at_most else "at least"


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

    `notes` is Markdown that describes the measurement. `timed` is True if other load changes the figures.
    """

    title: str
    notes: str
    tables: Sequence[Table]
    checks: Sequence[Check] = ()
    plots: Sequence[Bars] = ()
    timed: bool = True


@dataclass(frozen=True)
class Run:
    """A result with the machine, the date and the version of the code that it measured.

    `commit` and `code` come from `benchmarks.support.code`; both are empty in older runs.
    """

    name: str
    machine: str
    date: str
    disturbance: float  # share of the processors' time that other processes used during the run
    result: Result
    commit: str = ""
    code: str = ""
    seconds: float = 0.0  # duration of the run


@dataclass(frozen=True)
class History:
    """The last runs of one benchmark, oldest first."""

    name: str
    runs: Sequence[Run] = field(default_factory=tuple)

    def with_run(self, run: Run) -> "History":
        """Append a run, and drop the oldest ones beyond `KEPT_RUNS`."""
        return History(self.name, [*self.runs, run][-KEPT_RUNS:])

    def save(self, folder: Path) -> None:
        """Write `<folder>/<name>.json`."""
        folder.mkdir(parents=True, exist_ok=True)
        fields = {"name": self.name, "runs": [_without_name(run) for run in self.runs]}
        (folder / f"{self.name}.json").write_text(json.dumps(fields, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path, name: str) -> "History":
        """Load the history that `save` wrote; a missing file holds no runs."""
        path = folder / f"{name}.json"
        runs = json.loads(path.read_text())["runs"] if path.exists() else []
        return cls(name, [_run(name, fields) for fields in runs])


def _without_name(run: Run) -> dict[str, Any]:
    return {key: value for key, value in asdict(run).items() if key != "name"}


def _run(name: str, fields: dict[str, Any]) -> Run:
    result = dict(fields["result"])
    for key, kind in (("tables", Table), ("checks", Check), ("plots", Bars)):
        result[key] = [kind(**item) for item in result[key]]
    return Run(name=name, **(fields | {"result": Result(**result)}))
