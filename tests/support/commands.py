"""The commands as processes: `tpi` with a cache of its own, and only the workers that a test names."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import BytesIO, TextIOWrapper
from pathlib import Path
from unittest.mock import patch

from tests.support.paths import ROOT
from tpi.cli import run_command

TPI = [sys.executable, "-m", "tpi.cli"]


def tpi(*arguments: str, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TPI, *arguments], capture_output=True, text=True, timeout=100, env=clean(cache, environment), check=False
    )


def tpi_here(*arguments: str, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in this process, to test errors that end it early; return its output and exit status."""
    out, err = (TextIOWrapper(BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with (
        patch.dict(os.environ, clean(cache, environment), clear=True),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        code = run_command(arguments)
    said = [stream.buffer.getvalue().decode() for stream in (out, err)]
    return subprocess.CompletedProcess(arguments, code, *said)


_COUNTED = """
import sys
from tests.support.counting import calls
from tpi.cli import tpi

with calls() as made:
    tpi(sys.argv[1:], standalone_mode=False)
print(made.number, file=sys.stderr)
"""


def counted(*arguments: str, cache: Path) -> tuple[str, int]:
    """Return the command's output and its number of Python function calls, which does not depend on load."""
    command = [sys.executable, "-c", _COUNTED, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=clean(cache), check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout, int(done.stderr.splitlines()[-1])


def clean(cache: Path, extra: dict[str, str] | None = None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "TPI_WORKERS"}
    return kept | {"TPI_CACHE": str(cache)} | (extra or {})


@contextmanager
def listening_worker(cache: Path, *arguments: str) -> Iterator[str]:
    """Run a real `tpi worker` on free ports; yield its address."""
    command = [*TPI, "worker", "--listen", "127.0.0.1:0", "--cache", str(cache), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout
        try:
            yield process.stdout.readline().split(" listens on ")[1].split()[0]
        finally:
            process.terminate()
        assert process.wait(20) == 0


def run_json(*arguments: str, cache: Path, **environment: str) -> dict[str, object]:
    done = tpi("run", *arguments, "--json", cache=cache, **environment)
    assert done.returncode == 0, done.stderr
    last: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return last
