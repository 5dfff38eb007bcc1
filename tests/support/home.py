"""A testbed with a master that finds its workers, and with workers that come and go."""

import json
import os
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
from tpi.topology.topology import Host, HostLink, Topology, star

NAMES = ("a", "b", "c")
_SLOW = Host("a", cpu=0.3)
_CABLE = "l0"  # what the tc backend calls the first of its links, at both ends
_NEIGHBOURS = "10.79.0.0/24"


class Home:
    """A master on the slow device a, which answers on request, and workers on the other devices once started."""

    def __init__(self, root: Path, bed: Testbed, stack: ExitStack, multicast: bool = False) -> None:
        """Create the home. If the network does not carry `multicast`, a file replaces the announcements."""
        root.mkdir(parents=True, exist_ok=True)
        self._root, self._bed, self._stack, self._multicast = root, bed, stack, multicast
        self._keys = {name: root / "keys" / name for name in NAMES}
        pair_folders(*self._keys.values())
        (root / "announced").touch()

    def _environment(self, name: str) -> dict[str, str]:
        return os.environ | {"TPI_CACHE": str(self._root / name), "TPI_CONFIG": str(self._keys[name])}

    def begin(self, model: Path, *flags: str) -> None:
        """Start the master."""
        log = self._stack.enter_context((self._root / "log").open("wb"))
        program = [sys.executable, "-m", "tests.support.processes.finding_master", str(model)]
        said = "-" if self._multicast else str(self._root / "announced")
        self._master = self._bed.popen(
            "a", [*program, said, *flags], env=self._environment("a"), text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip
        self._stack.enter_context(started(self._stack.enter_context(self._master)))

    def start_worker(self, name: str) -> None:
        """Start the worker `name`, and announce it.

        With multicast, the worker announces itself and listens on all addresses.
        """
        address = self._bed.address(name)
        host, silent = ("0.0.0.0", ()) if self._multicast else (address, ("--no-announce",))
        command = [sys.executable, "-m", "tpi.cli", "worker", "--listen", f"{host}:9990", "--name", name, *silent]
        log = self._stack.enter_context((self._root / f"{name}-log").open("ab"))
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": log, "text": True}
        process = self._bed.popen(name, command, env=self._environment(name), **pipes)
        self._stack.enter_context(started(self._stack.enter_context(process)))
        assert process.stdout
        assert "listens on" in process.stdout.readline()
        with (self._root / "announced").open("a") as said:
            said.write(f"{name} {load_identity(self._keys[name]).public.hex()} {address}\n")

    def change_address(self, name: str, number: int) -> None:
        """Give the device `name`, at the other end of a's cable, another address, as another router would."""
        host, network = _NEIGHBOURS.removesuffix("0/24") + str(number), _NEIGHBOURS
        self._command(name, "addr", "flush", "dev", _CABLE)
        self._command(name, "addr", "flush", "dev", "lo", "to", f"{self._bed.address(name)}/32")
        self._command(name, "addr", "add", f"{host}/24", "dev", _CABLE)
        for target in (self._bed.address("a"), "10.78.0.1"):  # both that a has
            self._command(name, "route", "add", f"{target}/32", "dev", _CABLE)
        self._command("a", "route", "replace", network, "dev", _CABLE)

    def answer(self) -> list[str]:
        """Request an answer from the master; return the names of the nodes that computed it."""
        return self.ask()[0]

    def ask(self) -> tuple[list[str], list[int], int]:
        """Request an answer; return the names of the nodes, the tokens, and the bytes of weights sent to the nodes."""
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

    def output_of(self, name: str) -> str:
        """Return the output of the worker `name`."""
        return (self._root / f"{name}-log").read_text()

    def _command(self, name: str, *arguments: str) -> None:
        assert self._bed.popen(name, ["ip", *arguments]).wait(30) == 0, arguments


@contextmanager
def home(root: Path) -> Iterator[tuple[Home, Testbed]]:
    """Start a home of three devices around a router that does not carry multicast."""
    topology = star("later", (_SLOW, Host("b"), Host("c")), HostLink(("", ""), 1e9, 50e-6))
    with Testbed.start(topology, "tun", root=root / "bed") as bed, ExitStack() as stack:
        yield Home(root, bed, stack), bed


@contextmanager
def home_by_cable(root: Path) -> Iterator[tuple[Home, Testbed]]:
    """Start a home of two devices, a and b, on a cable that carries all packets, multicast included."""
    topology = Topology("cable", (_SLOW, Host("b")), (HostLink(("a", "b")),))
    with Testbed.start(topology, "tc", root=root / "bed") as bed, ExitStack() as stack:
        yield Home(root, bed, stack, multicast=True), bed
