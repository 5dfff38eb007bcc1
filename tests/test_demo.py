"""`make demo`, as the README begins with it: the target itself, with the environment that runs these tests."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
VENV = Path(sys.executable).parent.parent  # not resolved: its Python is a link to the system's

pytestmark = [
    pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed"),
    pytest.mark.skipif(not (VENV / "bin" / "tpi").exists(), reason="tpi is not installed beside this Python"),
]


@pytest.mark.timeout(300)
def test_the_demo_says_paris() -> None:
    """Set-up is left out: the environment is taken as it is, however old."""
    installed = VENV / ".installed"
    command = ["make", f"--old-file={installed}", "demo", f"VENV={VENV}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    answer = done.stdout.split("--local 2", 1)[1]  # behind the command, which make prints too
    assert "Paris" in answer
