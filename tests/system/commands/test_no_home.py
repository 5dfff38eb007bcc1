"""The commands as a user without an account, a home directory or `HOME`, as in many containers."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.commands import TPI
from tpi.config import default_cache

_USER = ["unshare", "--user", "--map-user=54321", "--map-group=54321"]


@pytest.fixture(scope="module", autouse=True)
def other_user() -> None:
    try:
        done = subprocess.run([*_USER, "true"], capture_output=True, check=False)
    except OSError:
        pytest.skip("unshare is not installed")
    if done.returncode:
        pytest.skip("this system lets no user make a user namespace")


def tpi(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS") if name in os.environ}
    return subprocess.run(
        [*_USER, *TPI, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100,
        env=kept | environment, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "command",
    [
        "ls",
        "rm x",
        "pull smollm2-135m",
        "run -m smollm2-135m -p hi",
        "chat -m smollm2-135m",
        "serve -m smollm2-135m",
        "worker --listen 127.0.0.1:0",
        "doctor",
        "bench -m smollm2-135m",
        "plan -m smollm2-135m",
        "pack smollm2-135m -o x",
    ],
)
def test_a_cache_is_asked_for_by_name(command: str) -> None:
    done = tpi(*command.split())
    assert done.returncode == 2
    assert done.stderr.startswith("tpi: this user (number 54321) has no home directory; set TPI_CACHE to ")
    assert len(done.stderr.splitlines()) == 1


def test_with_a_cache_all_runs_that_needs_no_keys(tmp_path: Path) -> None:
    (tmp_path / "models").symlink_to(default_cache() / "models")
    runs = {
        "ls": "model ",
        "run -m smollm2-135m -p hi -n 2 --local 1": "",
        "worker --listen 127.0.0.1:0 --attached": "listens on 127.0.0.1",
        "ps": "",
    }
    for command, said in runs.items():
        done = tpi(*command.split(), TPI_CACHE=str(tmp_path))
        assert done.returncode == 0, (command, done.stderr)
        assert said in done.stdout + done.stderr
        assert "Traceback" not in done.stderr
    assert names_of_home(tmp_path) == []


def names_of_home(folder: Path) -> list[Path]:
    """Return the files whose names begin with `~`, which a program without a home directory might make."""
    return [*folder.rglob("~*"), *Path.cwd().glob("~*")]


@pytest.mark.parametrize("command", ["keys show", "keys list", "pair", "worker --listen 0.0.0.0:0 --attached"])
def test_what_needs_keys_names_their_directory(command: str, tmp_path: Path) -> None:
    done = tpi(*command.split(), TPI_CACHE=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(
        "has no home directory; set TPI_CONFIG to a directory that can be written"
    )


@pytest.mark.parametrize(
    "command",
    [
        "run -m smollm2-135m -p hi",
        "run -m smollm2-135m -p hi --local 1",
        "chat -m smollm2-135m",
        "serve -m smollm2-135m --port 0",
        "pull smollm2-135m",
        "worker --listen 127.0.0.1:0 --attached",
        "doctor",
    ],
)
def test_a_cache_in_a_home_that_is_only_read_is_named(command: str, tmp_path: Path) -> None:
    inside = tmp_path / ".cache" / "tpi"
    inside.mkdir(parents=True)
    for folder in (inside, inside.parent, tmp_path):
        folder.chmod(0o555)
    try:
        done = tpi(*command.split(), HOME=str(tmp_path))
    finally:
        tmp_path.chmod(0o755)
    assert done.returncode in (1, 2)
    assert "set TPI_CACHE" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 1


def test_a_home_that_cannot_be_written_is_named_with_the_way_out(tmp_path: Path) -> None:
    done = tpi("run", "-m", "smollm2-135m", "-p", "hi", HOME="/proc")
    assert done.returncode in (1, 2)
    assert "TPI_CACHE" in done.stderr
    assert "Traceback" not in done.stderr
