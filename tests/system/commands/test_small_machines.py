"""Runs of several nodes with few resources of the system: they work, or one sentence names the true cause."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.commands import TPI, clean


def local(cache: Path, model: str, *before: str) -> "subprocess.CompletedProcess[str]":
    """Run three nodes, started by the command `before`."""
    command = [*before, *TPI, "run", "-m", model, "-p", "1 2", "-n", "2", "-q", "--local", "2"]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=clean(cache))


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="needs prlimit")
def test_too_few_open_files_are_named_with_how_many_would_do(cache: Path, model: str) -> None:
    done = local(cache, model, "prlimit", "--nofile=40")
    assert done.returncode == 2
    (needed,) = re.findall(r"^tpi: --local needs (\d+) open files at once, and this process may have 40;", done.stderr)
    done = local(cache, model, "prlimit", f"--nofile={needed}")
    assert done.returncode == 0, done.stderr
    done = local(cache, model, "prlimit", f"--nofile=40:{needed}")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="needs prlimit")
@pytest.mark.parametrize("command", ["ls", "run -m x -p hi", "serve -m x", "worker --listen 127.0.0.1:0 --attached"])
def test_a_command_that_may_open_too_few_files_says_so(cache: Path, command: str) -> None:
    told = ["prlimit", "--nofile=12", *TPI, *command.split()]
    done = subprocess.run(told, capture_output=True, text=True, timeout=100, check=False, env=clean(cache))
    assert done.returncode == 2
    assert done.stderr == (
        "tpi: tpi needs 32 open files at once, and this process may have 12; raise that (ulimit -n 32)\n"
    )


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="needs prlimit")
@pytest.mark.parametrize("extra", [(), ("--local", "1"), ("--memory", "2000MiB")])
def test_a_small_address_space_is_one_sentence(cache: Path, model: str, extra: tuple[str, ...]) -> None:
    told = ["prlimit", f"--as={400 << 20}", *TPI, "run", "-m", model, "-p", "1 2", "-n", "2", "-q", *extra]
    environment = clean(cache, {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
    done = subprocess.run(told, capture_output=True, text=True, timeout=100, check=False, env=environment)
    if "--memory" not in extra:  # then the tiny model may fit
        assert done.returncode == 2
        assert "too little for the model" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.returncode == 0 or "ulimit -v" in done.stderr


@pytest.mark.parametrize("variable", [{"TMPDIR": "/nonexistent"}, {"TMPDIR": "/proc"}])
def test_no_directory_for_temporary_files_is_needed(cache: Path, model: str, variable: dict[str, str]) -> None:
    command = [*TPI, "run", "-m", model, "-p", "1 2", "-n", "2", "-q", "--local", "1"]
    environment = clean(cache, variable)
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert done.returncode == 0, done.stderr


def test_a_missing_loopback_is_named(cache: Path, model: str) -> None:
    if subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs a network namespace of its own")
    done = local(cache, model, "unshare", "-n")
    assert done.returncode == 2
    assert done.stderr.startswith("tpi: --local needs the loopback interface, and 127.0.0.1 cannot be reached")
    assert len(done.stderr.splitlines()) == 1
