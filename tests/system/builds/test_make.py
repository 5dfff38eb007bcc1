"""The targets of the Makefile, with commands that only record that they ran; and the packages that CI installs."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
LINTED = ["ruff check .", "ruff format --check .", "mypy", "python .ci/prose.py"]


def made(folder: Path, target: str, failing: str) -> tuple[int, list[str]]:
    """Return the exit code of `make target`, and the commands that ran; commands with the word `failing` fail."""
    noted = folder / "noted"
    noted.touch()
    (folder / "bin").mkdir(exist_ok=True)
    (folder / ".installed").touch()
    for name in ("pytest", "ruff", "mypy", "python"):
        line = f"{name} $*"
        script = f'#!/bin/sh\necho "{line}" >> {noted}\ncase "{line}" in *"{failing}"*) exit 1;; esac\n'
        (folder / "bin" / name).write_text(script)
        (folder / "bin" / name).chmod(0o755)
    command = ["make", f"--old-file={folder / '.installed'}", target, f"VENV={folder}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, [line.strip() for line in noted.read_text().splitlines()]


@pytest.mark.parametrize("failing", ["--numprocesses", "-m alone", "pytest", "none of them"])
def test_make_test_runs_both_phases_and_fails_if_either_did(tmp_path: Path, failing: str) -> None:
    code, ran = made(tmp_path, "test", failing)
    assert [re.findall(r"-m (not alone|alone)$", line) for line in ran] == [["not alone"], ["alone"]]
    assert (code == 0) == (failing == "none of them")


@pytest.mark.parametrize("failing", [*LINTED, "none of them"])
def test_make_check_runs_every_tool_and_fails_if_one_did(tmp_path: Path, failing: str) -> None:
    code, ran = made(tmp_path, "check", failing)
    assert ran == LINTED
    assert (code == 0) == (failing == "none of them")


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_a_page_names_every_package_that_ci_installs(page: str) -> None:
    installed = re.search(r"^wanted=\((.+)\)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert installed
    assert [name for name in installed[1].split() if f"`{name}`" not in (ROOT / page).read_text()] == []
