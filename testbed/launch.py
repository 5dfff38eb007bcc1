"""A running testbed as an object: methods to start it, to run programs on its devices, and to take it down.

The module also removes what dead testbeds left behind.
"""

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
from testbed.control import ask
from testbed.holder import TOPOLOGY, remove
from testbed.network.backends import choose_backend
from testbed.network.namespaces import require_root
from testbed.network.qdisc import has_netem
from testbed.processes import marked
from testbed.state import TestbedRecord
from tpi.errors import TestbedError
from tpi.system.modules import module_command
from tpi.topology.topology import Topology

_STOP_SECONDS = 15.0


class Testbed:
    """A running testbed. As a context manager, it is always taken down at the end of the block.

    Attributes:
        topology: the requested topology.
        record: names, addresses and namespaces of the devices.
    """

    __test__ = False  # keeps pytest from collecting it as a test class

    def __init__(self, folder: Path, topology: Topology, holder: "subprocess.Popen[bytes]") -> None:
        self.folder, self.topology, self._holder = folder, topology, holder
        self.record = state.read(folder)

    @classmethod
    def start(
        cls, topology: Topology, backend: str = "auto", owner: str = "run", root: Path | None = None
    ) -> "Testbed":
        """Create the namespaces, cgroups and links of `topology`. `testbed.checks.verify` verifies the links.

        Args:
            topology: the devices and links to emulate.
            backend: "tc", "tun", or "auto" for a backend that this machine supports.
            owner: "run": the testbed ends with this process; "up": it stays until `tpi testbed down`.
            root: parent of the state directory; None: the default one.

        Raises:
            TestbedError: without root, or if this machine cannot do what the topology asks for.
        """
        require_root()
        chosen = choose_backend(topology, backend, has_netem())
        folder = state.new_folder(root or state.default_root())
        lock = state.lock(folder)
        try:
            (folder / TOPOLOGY).write_text(json.dumps(topology.to_dict()))
            state.write(folder, TestbedRecord(folder.name, topology.name, chosen, owner))
            holder = _start_holder(folder, owner, lock)
        finally:
            os.close(lock)
        return cls(folder, topology, holder)

    def popen(self, device: str, command: list[str], tied: bool = True, **options: Any) -> "subprocess.Popen[Any]":
        """Start a program on `device`. Other `options` are those of subprocess.Popen.

        Args:
            device: name of the device.
            command: the program and its arguments.
            tied: kill the program as soon as the calling thread ends.
        """
        self.record.host(device)
        options["env"] = marked(self.record, device, options.get("env") or os.environ)
        parent = str(os.getpid() if tied else 0)
        return subprocess.Popen(module_command("testbed.enter", str(self.folder), device, parent, *command), **options)

    def address(self, device: str) -> str:
        """Return the IPv4 address of `device`."""
        return self.record.host(device).address

    def ask(self, verb: str, **fields: Any) -> Any:
        """Send the request `verb` to the holder process and return its result.

        `testbed.network.backends.Backend.handlers` lists the requests.
        """
        return ask(self.folder, verb, **fields)

    def ended(self) -> bool:
        """Return True if the holder process has ended, which removes the network too."""
        return self._holder.poll() is not None

    def close(self) -> None:
        """Take the testbed down and wait until nothing of it is left."""
        take_down(self.folder)
        if self._holder.stdin is not None:
            self._holder.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._holder.wait(_STOP_SECONDS)  # it has released its lock, so it is about to end

    def __enter__(self) -> "Testbed":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _start_holder(folder: Path, owner: str, lock: int) -> "subprocess.Popen[bytes]":
    """Start the holder process and wait until the network is set up.

    If the owner is "run", the holder process ends when its stdin is closed.
    """
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
    """Return the last line of the log `file`, or a sentence if the log is empty."""
    try:
        lines = file.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1] if lines else "its holder process ended without a message"


def take_down(folder: Path) -> None:
    """End the testbed at `folder`, whether it runs or not, and wait until nothing of it is left.

    Raises:
        TestbedError: if a process or a cgroup of the testbed cannot be removed.
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
    if holder and state.alive(folder):  # the lock is held, so the process id is still the holder's
        os.kill(holder, signal.SIGKILL)


def remove_dead(folder: Path) -> None:
    """Remove the processes, cgroups and files of the testbed at `folder`, whose holder process has ended."""
    if not folder.exists():
        return
    try:
        remove(folder, state.read(folder))
    except TestbedError:
        if (folder / "state.json").exists():
            raise
        state.discard(folder)


def remove_dead_testbeds(root: Path | None = None) -> list[str]:
    """Remove the remains of all testbeds whose holder has ended. Return their ids."""
    dead = [folder for folder in state.folders(root or state.default_root()) if not state.alive(folder)]
    for folder in dead:
        remove_dead(folder)
    return [folder.name for folder in dead]
