"""The report that a run prints."""

from dataclasses import replace

import pytest
from rich.cells import cell_len

from allreduce.choose import Choice
from master.reporting.report import NodeReport, print_choice, print_nodes
from tpi.net.questions import Steady

MIB = 1 << 20
WAITS = Steady(0.001, 0.002, 0.001, 0.004, 0.008, False, False, False, 0.2, 0, 0, 0, 310 * MIB, 0.005, 0.012)


def test_the_choice_of_collectives_is_shown_with_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    predicted = {"star": (0.010, 0.080, 0.040), "mesh": (0.005, 0.050, 0.030)}
    measured = {"star": (0.0, 0.0, 0.0), "mesh": (0.006, 0.051, 0.032)}
    print_choice(Choice("mesh", "mesh", True, 64, 2048, predicted, measured, links_age_s=5400).fields())
    shown = capsys.readouterr().out
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in shown.splitlines() if line.strip()}
    assert lines["star"] == "10.00 80.00 40.00"
    assert lines["mesh"] == "5.00 / 6.00 50.00 / 51.00 30.00 / 32.00"
    assert "mesh for tokens, mesh in halves for prompts" in shown
    assert "links measured 1.5 h ago" in shown


def test_an_unmeasured_choice_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    print_choice(Choice("star", "two-shot", False, 64, 2048, {"star": (0.001, 0.002, 0.001)}, {}).fields())
    assert "two-shot for prompts (all on this machine)" in capsys.readouterr().out


def report(steady: Steady) -> NodeReport:
    """Return the report of a node with 100 MiB planned, 60 MiB of them for blocks."""
    sizes = (0, 60 * MIB, 0, 100 * MIB, 0)
    return NodeReport(
        "laptop", 0, [[0, 2]], [0, 2], [0, 1], [0, 64], *sizes, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, steady
    )


@pytest.mark.parametrize(
    ("steady", "says"),
    [
        (replace(WAITS, steady=True), "streams in the steady state (a layer loads in 12.0 ms and is busy for 5.0 ms)"),
        (
            WAITS,
            "waits 200.0 ms per token for its disk (a layer loads in 12.0 ms and is busy for 5.0 ms); "
            "no --window avoids that: use about --memory 310MiB without --window, or more nodes",
        ),
        (replace(WAITS, window=3, window_memory=110 * MIB + 1), "--window 3 --memory 111MiB would avoid that"),
        (
            replace(WAITS, window=4, retain=2, window_memory=90 * MIB),
            "--window 4 --retain 2 --memory 90MiB would avoid that",
        ),
    ],
)
def test_a_waiting_node_is_told_what_would_end_the_waits(
    steady: Steady, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_nodes([report(steady)], "a summary")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "laptop:" in line]
    assert says in line


NAMES = ("laptop", "my-old-laptop-in-the-kitchen (192.168.100.107:9990)", "[red]\u4f60\u597d")


@pytest.mark.parametrize("columns", ["20", "80", "200"])
def test_the_table_fits_80_columns_and_loses_nothing(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    large = replace(
        report(WAITS), heads=[100, 128], neurons=[10240, 28672], steady=None,
        weight_bytes=87_123_456_789, peak_rss_bytes=23_456_000_000, sent_bytes_per_token=123_456_789.0,
    )  # fmt: skip
    nodes = [replace(large, name=name) for name in NAMES]
    print_nodes(nodes, "a summary", stderr=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert max(map(cell_len, lines)) <= max(80, int(columns))
    assert "\x1b" not in captured.err
    for figures_shown in ("100-127", "10240-28671", "87123", "123457"):
        assert captured.err.count(figures_shown) == 3
    names = captured.err if columns == "200" else "".join(line[:12].strip() for line in lines)
    assert all(part in names for part in ("laptop", "192.168.", "[red]"))
