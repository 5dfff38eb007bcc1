"""What people are shown of a run."""

from dataclasses import replace

import pytest

from allreduce.choose import Choice
from master.report import NodeReport, print_choice, print_nodes
from tpi.messages import Steady

MIB = 1 << 20
WAITS = Steady(0.001, 0.002, 0.001, 0.004, 0.008, False, False, False, 0.2, 0, 0, 0, 310 * MIB)


def test_the_choice_of_collectives_is_shown_with_what_it_was_made_by(capsys: pytest.CaptureFixture[str]) -> None:
    predicted = {"star": (0.010, 0.080, 0.040), "mesh": (0.005, 0.050, 0.030)}
    measured = {"star": (0.0, 0.0, 0.0), "mesh": (0.006, 0.051, 0.032)}
    print_choice(Choice("mesh", "mesh", True, 64, 2048, predicted, measured).fields())
    shown = capsys.readouterr().out
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in shown.splitlines() if line.strip()}
    assert lines["star"] == "10.00 80.00 40.00"
    assert lines["mesh"] == "5.00 / 6.00 50.00 / 51.00 30.00 / 32.00"
    assert "mesh for tokens, mesh in halves for prompts" in shown


def test_an_unmeasured_choice_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    print_choice(Choice("star", "two-shot", False, 64, 2048, {"star": (0.001, 0.002, 0.001)}, {}).fields())
    assert "two-shot for prompts (all on this machine)" in capsys.readouterr().out


def report(steady: Steady) -> NodeReport:
    """A node with 100 MiB planned, 60 of them for blocks."""
    return NodeReport(
        "laptop", 0, [0, 2], [0, 1], [0, 64], 0, 60 * MIB, 0, 100 * MIB, 0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, steady
    )


@pytest.mark.parametrize(
    ("steady", "says"),
    [
        (replace(WAITS, steady=True), "streams in the steady state (a layer loads in 12.0 ms and is busy for 5.0 ms)"),
        (
            WAITS,
            "waits 200.0 ms per token for its disk (a layer loads in 12.0 ms and is busy for 5.0 ms); "
            "no --window ends that, but about --memory 310MiB without one would, or more nodes",
        ),
        (replace(WAITS, window=3, window_bytes=70 * MIB + 1), "with --window 3 and --memory 111MiB it would not"),
        (
            replace(WAITS, window=4, retain=2, window_bytes=50 * MIB),
            "with --window 4 --retain 2 and --memory 90MiB it would not",
        ),
    ],
)
def test_who_waits_for_the_disk_is_told_what_would_end_that(
    steady: Steady, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_nodes([report(steady)], "a summary")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "laptop:" in line]
    assert says in line
