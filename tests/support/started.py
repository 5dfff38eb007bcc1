"""Runs of `tpi serve` in a process of its own."""

import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.support.commands import TPI, clean


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[httpx.Client]:
    """Run `tpi serve` during the block, with its log in `folder`; yield its address."""
    with server(folder, *flags) as (_, http):
        yield http


@contextmanager
def server(folder: Path, *flags: str) -> Iterator[tuple["subprocess.Popen[str]", httpx.Client]]:
    """Run `tpi serve` as `serving` does; yield its address and its process."""
    command = [*TPI, "serve", "--port", "0", "-q", *flags]
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=clean(folder)) as process,
    ):
        assert process.stdout
        try:
            line = next((line for line in process.stdout if " is served at " in line), "")
            assert line, (folder / "log").read_text()
            with httpx.Client(base_url=re.findall(r"http://[^;\s]+", line)[0], timeout=100) as http:
                yield process, http
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
