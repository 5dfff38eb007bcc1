"""The commands as processes: `tpi` with a cache of its own and no workers but those that a test names."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TPI = [sys.executable, "-m", "tpi.cli"]


def tpi(*arguments: str, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TPI, *arguments], capture_output=True, text=True, timeout=100, env=clean(cache, environment), check=False
    )


def clean(cache: Path, extra: dict[str, str] | None = None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "TPI_WORKERS"}
    return kept | {"TPI_CACHE": str(cache)} | (extra or {})


@contextmanager
def listening_worker(cache: Path, *arguments: str) -> Iterator[str]:
    """A real `tpi worker` on free ports; its address."""
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
