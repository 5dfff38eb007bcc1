"""A testbed as an object: start one, run programs on its devices, take it down; remove the remains of dead ones."""

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from testbed import state
from testbed.checks.doctor import has_netem
from testbed.control import ask
from testbed.holder import TOPOLOGY, remove
from testbed.network.backends import choose_backend
from testbed.network.namespaces import require_root
from testbed.processes import marked
from testbed.state import TestbedRecord
from tpi.errors import TestbedError
from tpi.system.modules import module_command
from tpi.topology.topology import Topology

_START_SECONDS = 60.0
_STOP_SECONDS = 15.0


class Testbed:
    """A running testbed. Use it as a context manager: it is taken down at the end of the block, however that ends.

    Attributes:
        topology: what was asked for.
        record: names, addresses and namespaces of the devices.
    """

    __test__ = False  # no test class, whatever its name says to pytest

    def __init__(self, folder: Path, topology: Topology, holder: "subprocess.Popen[bytes] | None" = None) -> None:
        self.folder, self.topology, self._holder = folder, topology, holder
        self.record = state.read(folder)

    @classmethod
    def start(
        cls, topology: Topology, backend: str = "auto", owner: str = "run", root: Path | None = None
    ) -> "Testbed":
        """Make the namespaces, cgroups and links of `topology`. `testbed.checks.verify` verifies the shaping.

        Args:
            owner: "run" ties it to the life of this process; "up" lets it live until `tpi testbed down`.

        Raises:
            TestbedError: without root, or where this machine cannot do what the topology asks.
        """
        require_root()
        chosen = choose_backend(topology, backend, has_netem())
        folder = state.new_folder(root or state.default_root())
        lock = state.hold(folder)
        try:
            (folder / TOPOLOGY).write_text(json.dumps(topology.to_dict()))
            state.write(folder, TestbedRecord(folder.name, topology.name, chosen, owner))
            holder = _start_holder(folder, owner, lock)
        finally:
            os.close(lock)
        return cls(folder, topology, holder)

    @classmethod
    def attach(cls, folder: Path) -> "Testbed":
        """The running testbed at `folder`, started by another process."""
        try:
            topology = Topology.from_dict(json.loads((folder / TOPOLOGY).read_text()))
        except (OSError, ValueError) as error:
            raise TestbedError(f"there is no usable testbed at {folder}: `tpi testbed down` clears it up") from error
        return cls(folder, topology)

    def popen(self, device: str, command: list[str], tied: bool = True, **options: Any) -> "subprocess.Popen[Any]":
        """Start a program on `device`; `options` are those of subprocess.Popen.

        Args:
            tied: kill it as soon as the calling thread ends.
        """
        self.record.host(device)
        options["env"] = marked(self.record, device, options.get("env") or os.environ)
        parent = str(os.getpid() if tied else 0)
        return subprocess.Popen(module_command("testbed.enter", str(self.folder), device, parent, *command), **options)

    def address(self, device: str) -> str:
        """IPv4 address of `device`."""
        return self.record.host(device).address

    def ask(self, verb: str, **fields: Any) -> Any:
        """Send the holder a request: see `testbed.network.backends.Backend.handlers`."""
        return ask(self.folder, verb, **fields)

    def ended(self) -> bool:
        """Whether the holder is gone, and the network with it."""
        return self._holder.poll() is not None if self._holder else not state.alive(self.folder)

    def close(self) -> None:
        """Take the testbed down and wait until nothing of it is left."""
        take_down(self.folder)
        if self._holder is not None:
            if self._holder.stdin is not None:
                self._holder.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._holder.wait(_STOP_SECONDS)  # its lock is free, so it ends

    def __enter__(self) -> "Testbed":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _start_holder(folder: Path, owner: str, lock: int) -> "subprocess.Popen[bytes]":
    """Start the holder process and wait until the network stands. Its standard input is its lifeline."""
    with (folder / "holder.log").open("wb") as log:
        holder = subprocess.Popen(
            module_command("testbed.holder", str(folder)),
            stdin=subprocess.PIPE if owner == "run" else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            pass_fds=(lock,),
            start_new_session=True,
        )
    assert holder.stdout is not None
    with holder.stdout:
        line = holder.stdout.readline()
    message = json.loads(line) if line else {"error": _tail(folder / "holder.log")}
    if "error" not in message:
        return holder
    if holder.stdin is not None:
        holder.stdin.close()
    holder.wait()
    remove_dead(folder)
    raise TestbedError(f"the testbed cannot be set up: {message['error']}")


def _tail(file: Path) -> str:
    """The last line of a log."""
    try:
        lines = file.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1] if lines else "its holder ended without a word"


def take_down(folder: Path) -> None:
    """End the testbed at `folder`, dead or alive, and wait until nothing of it is left.

    Raises:
        TestbedError: if something of it will not go.
    """
    if state.alive(folder):
        try:
            ask(folder, "down", timeout=2.0)
        except TestbedError:
            _kill_holder(folder)
        deadline = time.monotonic() + _STOP_SECONDS
        while state.alive(folder) and folder.exists():
            if time.monotonic() > deadline:
                _kill_holder(folder)
            time.sleep(0.005)
    remove_dead(folder)


def _kill_holder(folder: Path) -> None:
    try:
        holder = state.read(folder).holder
    except TestbedError:
        return
    if holder and state.alive(folder):  # so the number still means the holder
        os.kill(holder, signal.SIGKILL)


def remove_dead(folder: Path) -> None:
    """Remove what a testbed without a holder has left: processes, cgroups, files."""
    if not folder.exists():
        return
    try:
        remove(folder, state.read(folder))
    except TestbedError:
        if (folder / "state.json").exists():
            raise
        state.discard(folder)


def sweep(root: Path | None = None) -> list[str]:
    """Remove the remains of all testbeds whose holder is gone; returns their ids."""
    dead = [folder for folder in state.folders(root or state.default_root()) if not state.alive(folder)]
    for folder in dead:
        remove_dead(folder)
    return [folder.name for folder in dead]
