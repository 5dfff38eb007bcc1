"""A master in a testbed that finds its workers, and workers that come and go."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from testbed.launch import Testbed
from tests.support.cluster.key_helpers import pair_folders
from tests.support.testbed_helpers import started
from tpi.keys.identity import load_identity
from tpi.topology.topology import Host, HostLink, star

NAMES = ("a", "b", "c")


class Home:
    """A master on a slow device, a, that answers when it is asked to; workers on the others, once they are started."""

    def __init__(self, root: Path, bed: Testbed, stack: ExitStack) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self._root, self._bed, self._stack = root, bed, stack
        self._keys = {name: root / "keys" / name for name in NAMES}
        pair_folders(*self._keys.values())
        (root / "announced").touch()

    def _environment(self, name: str) -> dict[str, str]:
        return os.environ | {"TPI_CACHE": str(self._root / name), "TPI_CONFIG": str(self._keys[name])}

    def begin(self, model: Path, *flags: str) -> None:
        """Start the master."""
        log = self._stack.enter_context((self._root / "log").open("wb"))
        program = [sys.executable, "-m", "tests.support.processes.finding_master", str(model)]
        self._master = self._bed.popen(
            "a", [*program, str(self._root / "announced"), *flags], env=self._environment("a"), text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip
        self._stack.enter_context(started(self._stack.enter_context(self._master)))

    def wakes_at(self, name: str, other: str) -> None:
        """The machine that sleeps at `name` comes up at `other`: its key and what it has cached come along."""
        shutil.copytree(self._root / name, self._root / other)
        self._keys[other] = self._keys[name]
        (self._root / "announced").write_text("")
        self.joins(other, called=name)

    def joins(self, name: str, called: str = "") -> None:
        """Start a worker, and have it announced."""
        address = self._bed.address(name)
        command = [sys.executable, "-m", "tpi.cli", "worker", "--listen", f"{address}:9990", "--name", called or name]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        process = self._bed.popen(name, [*command, "--no-announce"], env=self._environment(name), **pipes)
        self._stack.enter_context(started(self._stack.enter_context(process)))
        assert process.stdout
        assert "listens on" in process.stdout.readline()
        with (self._root / "announced").open("a") as said:
            said.write(f"{called or name} {load_identity(self._keys[name]).public.hex()} {address}\n")

    def answer(self) -> list[str]:
        """Have a request answered; the names of the nodes that did."""
        return self.ask()[0]

    def ask(self) -> tuple[list[str], list[int], int]:
        """Have a request answered; the names of the nodes, the tokens, and the bytes of weights sent for them."""
        assert self._master.stdin
        assert self._master.stdout
        self._master.stdin.write("\n")
        line = self._master.stdout.readline()
        assert line, self.said
        names, tokens, sent = json.loads(line)
        return names, tokens, sent

    @property
    def said(self) -> str:
        return (self._root / "log").read_text()


@contextmanager
def home(root: Path) -> Iterator[tuple[Home, Testbed]]:
    devices = (Host("a", cpu=0.3), Host("b"), Host("c"))
    topology = star("later", devices, HostLink(("", ""), 1e9, 50e-6))
    with Testbed.start(topology, "tun", root=root / "bed") as bed, ExitStack() as stack:
        yield Home(root, bed, stack), bed
