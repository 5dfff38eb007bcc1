"""Machines with keys of their own, in network namespaces: paired by a code, used, revoked. Needs root on Linux."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from testbed.launch import Testbed
from tests.support.models import TinyModel
from tests.support.testbed_helpers import needs_root, started, wheel

pytestmark = [needs_root, pytest.mark.waits]

TPI = [sys.executable, "-u", "-m", "tpi.cli"]
ANSWER = ["--raw", "--temp", "0", "-n", "6", "-p", "Hello", "--split", "equal"]


class Home:
    """Devices a, b, c, each with a folder of keys and a cache."""

    def __init__(self, bed: Testbed, root: Path) -> None:
        self.bed, self.root = bed, root

    def start(self, device: str, *arguments: str) -> "subprocess.Popen[str]":
        home = self.root / device
        home.mkdir(exist_ok=True)
        environment = os.environ | {"TPI_CONFIG": str(home / "keys"), "TPI_CACHE": str(home / "cache")}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return self.bed.popen(device, [*TPI, *arguments], env=environment, **pipes)

    def tpi(self, device: str, *arguments: str) -> tuple[int, str]:
        process = self.start(device, *arguments)
        output, _ = process.communicate(timeout=90)
        return process.returncode, output

    @contextmanager
    def worker(self, device: str) -> Iterator[str]:
        """Run a worker on `device`; yield its address."""
        listen = ("worker", "--listen", f"{self.bed.address(device)}:9990", "--no-announce", "--name", device)
        with started(self.start(device, *listen)) as process:
            assert process.stdout is not None
            with process.stdout:
                assert "listens on" in process.stdout.readline()
                yield f"{self.bed.address(device)}:9990"
                process.send_signal(signal.SIGTERM)

    def pair(self, host: str, guest: str) -> None:
        """Pair two devices by a code that `host` shows and `guest` enters."""
        with started(self.start(host, "pair", "--listen", f"{self.bed.address(host)}:9993", "--name", host)) as waiting:
            assert waiting.stdout is not None
            with waiting.stdout:
                lines = iter(waiting.stdout.readline, "")
                code = next(found[1] for line in lines if (found := re.search(r"tpi pair \S+ (\d{3}-\d{3})", line)))
                status, said = self.tpi(guest, "pair", self.bed.address(host), code, "--name", guest)
                assert status == 0, said
                assert f"paired with {host}" in said
                assert waiting.wait(30) == 0


def test_machines_are_strangers_before_pairing_or_once_revoked(
    tmp_path: Path, tiny_model: Callable[[str], TinyModel]
) -> None:
    """The workers are paired with the master, but not with each other: it tells them each other's keys for the mesh."""
    model = str(tiny_model("llama").directory)
    with Testbed.start(wheel(3, 1e9, 0.0005), "tun", root=tmp_path / "bed") as bed:
        home = Home(bed, tmp_path)
        with home.worker("b") as b, home.worker("c") as c:
            run = ("run", "-m", model, *ANSWER, "--workers", f"{b},{c}", "--collective", "mesh")
            code, said = home.tpi("a", *run)
            assert code == 1
            assert "has none of the keys that this machine" in said
            home.pair("b", "a")
            home.pair("a", "c")
            code, said = home.tpi("a", *run)
            assert code == 0, said
            assert "3 nodes, f32, mesh over f32" in said
            code, said = home.tpi("a", *run[:-1], "torch")
            assert code == 2
            assert "the collective 'torch' opens connections without keys to b, c" in said
            paired = dict(line.split()[:2] for line in home.tpi("a", "keys", "list")[1].splitlines())
            assert paired.keys() == {"b", "c"}
            assert home.tpi("b", "keys", "show")[1].startswith(paired["b"])
            assert home.tpi("b", "keys", "revoke", "a")[0] == 0
            code, said = home.tpi("a", *run)
            assert code == 1
            assert "does not accept this machine's key" in said
            assert "Traceback" not in said
