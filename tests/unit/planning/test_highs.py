"""Solving programs prints nothing on stdout, which is for answers, although the solver's library prints."""

import ctypes
import os
import subprocess
import sys

import numpy as np
import pytest
import scipy.optimize

from scheduler.model.highs import solve_milp
from tpi.system.hidden import stdout_hidden


def test_what_the_library_prints_is_not_seen(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    real = scipy.optimize.milp

    def talking(*arguments: object, **options: object) -> object:
        ctypes.CDLL(None).puts(b"a line that was left in")
        return real(*arguments, **options)

    monkeypatch.setattr(scipy.optimize, "milp", talking)
    sys.stdout.write("before\n")
    found = solve_milp(np.array([1.0]), bounds=scipy.optimize.Bounds(2, 5))
    sys.stdout.write("after\n")
    sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)
    assert found.x == pytest.approx([2.0])
    assert capfd.readouterr().out == "before\nafter\n"


def test_nothing_stays_open_and_an_error_comes_through() -> None:
    before = os.dup(0)  # the lowest number that is free
    os.close(before)
    with pytest.raises(KeyError), stdout_hidden(), stdout_hidden():
        raise KeyError
    after = os.dup(0)
    os.close(after)
    assert after == before


def test_a_process_without_stdout_computes_all_the_same() -> None:
    program = "import os; os.close(1)\nfrom tpi.system.hidden import stdout_hidden\nwith stdout_hidden(): pass"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
