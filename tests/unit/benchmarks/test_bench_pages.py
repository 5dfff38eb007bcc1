"""The machinery of benchmarks: which runs a page shows, their age, and that one failure does not end the others."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.__main__ import RESULTS
from benchmarks.compare import verdict
from benchmarks.page.document import Section, markdown
from benchmarks.page.summary import KNOWN, summary
from benchmarks.page.typical import shown, typical
from benchmarks.registry import BENCHMARKS
from benchmarks.result import KEPT_RUNS, Check, History, Result, Row, Run, Table
from benchmarks.support import several
from benchmarks.support.code import ROOT, changes_since, commit, digest

NAME = "startup"
CODE = digest(BENCHMARKS[NAME].measures)


def a_run(value: float, code: str = CODE, machine: str = "here", text: str = "1.0 (2.00x)") -> Run:
    rows: list[Row] = [{"engine": "TPI", "speed": value, "ratio": text}]
    result = Result("Start", "How.", [Table("Speeds", rows)], [Check("speed", value, 3.0)], [])
    return Run(NAME, machine, "2026-11-24", 0.0, result, commit="0123456789ab", code=code)


def test_a_section_is_the_median_of_runs_of_this_code() -> None:
    runs = [a_run(9, code="other"), a_run(1), a_run(50, machine="there"), a_run(2), a_run(7)]
    section = Section.of(History(NAME, runs))
    assert [run.result.checks[0].value for run in section.runs] == [1, 2, 7]
    assert section.age == ""
    text = markdown(section)
    assert "medians of 3 runs" in text
    assert "| speed | at least | 3 | 2 | 1 to 7 | **no** |" in text


def test_numbers_within_text_have_medians_too() -> None:
    texts = ["1.0 (2.00x)", "5.0 (2.50x)", "3.0 (9.00x)"]
    (table,) = typical([a_run(1, text=text) for text in texts]).tables
    assert table.rows[0]["ratio"] == "3.0 (2.50x)"


def test_runs_of_older_code_are_marked_with_the_last_of_them() -> None:
    runs = [a_run(1, code="older"), a_run(2, code="old")]
    section = Section.of(History(NAME, runs))
    assert [run.code for run in section.runs] == ["old"]
    assert "Older than the code that it measures" in markdown(section)
    before = Section.of(History(NAME, [replace(a_run(1), code="", commit="")]))
    assert "before commits were recorded" in markdown(before)
    assert shown([a_run(1, code="")], "") == [a_run(1, code="")]


def test_the_age_is_known_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tpi").mkdir()
    (tmp_path / "tpi" / "a.py").write_text("1")
    before = digest(["tpi", "gone.py"], tmp_path)
    (tmp_path / "tpi" / "notes.txt").write_text("no code")
    assert digest(["tpi", "gone.py"], tmp_path) == before
    (tmp_path / "tpi" / "a.py").write_text("2")
    assert digest(["tpi", "gone.py"], tmp_path) != before
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit() == ""
    assert changes_since("0123456789ab", ["tpi"]) is None


def test_the_last_runs_are_kept(tmp_path: Path) -> None:
    history = History(NAME)
    for number in range(KEPT_RUNS + 3):
        history = history.with_run(a_run(number))
    history.save(tmp_path)
    loaded = History.load(tmp_path, NAME)
    assert [run.result.checks[0].value for run in loaded.runs] == list(range(3, KEPT_RUNS + 3))
    assert loaded.runs[-1] == history.runs[-1]
    assert History.load(tmp_path, "other").runs == []


@pytest.mark.parametrize(("value", "kept"), [(0.89, False), (0.91, True), (1.09, True), (1.11, False)])
def test_a_promise_may_have_two_sides(value: float, kept: bool) -> None:
    assert Check("as long as before", value, 1.0, within=0.1).kept is kept


def test_the_page_begins_with_what_is_not_kept() -> None:
    text = summary([(typical([a_run(1)]), ""), (typical([a_run(4)]), "old")])
    assert "1 of 2 promises are kept" in text
    assert "1 of 2 sections were measured with older" in text
    assert "- Start: speed is 1, promised at least 3" in text
    assert "speed is 4" not in text
    assert all(f"- {words}" in text for words in KNOWN)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_is_there_and_what_it_measures_too(name: str) -> None:
    benchmark = BENCHMARKS[name]
    assert callable(benchmark.load())
    assert all((ROOT / path).exists() for path in benchmark.measures)
    history = History.load(RESULTS, name)
    assert len(history.runs) <= KEPT_RUNS
    assert not history.runs or markdown(Section.of(history))


def test_a_benchmark_that_fails_does_not_end_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    scripts = {"kernels": "print('a'); raise SystemExit(3)", "parity": "print('b')"}
    status = several.run_all(list(scripts), None, lambda name: [sys.executable, "-c", scripts[name]])
    said = capfd.readouterr().out
    assert status == 1
    assert "FAILED with status 3" in said
    assert "b\n" in said
    assert said.splitlines()[-1].startswith("parity           done in")


def test_what_exceeds_the_limit_is_ended_and_the_rest_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(1000)"]
    assert several.run_all(["kernels", "parity"], 0.2, lambda name: sleeper) == 0
    said = capfd.readouterr().out.splitlines()
    assert "the five minutes of --quick are over" in said[-2]
    assert said[-1].endswith(several.QUICK_OVER)


def test_what_a_benchmark_needs_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lacking = replace(BENCHMARKS["kernels"], extras=("no_such_module",))
    monkeypatch.setitem(BENCHMARKS, "kernels", lacking)
    assert several.run_all(["kernels"], None) == 0
    assert "left out: needs no_such_module" in capsys.readouterr().out
    several.announce(["peers", "startup"], {"startup": [60.0, 240.0, 180.0]})
    said = capsys.readouterr().out
    assert "needs llama-cpp-python" in said
    assert "startup          about   3 min" in said


@pytest.mark.parametrize(
    ("name", "base", "head", "ratio", "fine"),
    [
        ("decode", [10.0, 20.0, 30.0], [9.6, 19.2, 10.0], "0.960", True),
        ("decode", [10.0, 20.0, 30.0], [9.0, 18.0, 40.0], "0.900", False),
        ("first token, s", [1.0, 1.0, 1.0], [1.2, 1.1, 1.0], "0.909", False),
        ("peak, MiB", [100.0, 100.0, 100.0], [101.0, 101.9, 150.0], "1.019", True),
        ("peak, MiB", [100.0, 100.0, 100.0], [101.0, 102.1, 150.0], "1.021", False),
    ],
)
def test_two_commits_are_compared_pair_by_pair(
    name: str, base: list[float], head: list[float], ratio: str, fine: bool
) -> None:
    line, found = verdict(name, [({name: a}, {name: b}) for a, b in zip(base, head, strict=True)])
    assert ratio in line
    assert found is fine
