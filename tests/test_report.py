"""What people are shown of a run."""

import pytest

from allreduce.choose import Choice
from master.report import print_choice


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
