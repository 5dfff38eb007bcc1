"""The process of a running testbed: it holds the namespaces, carries the packets, answers requests, and cleans up.

It is started as `python -m testbed.holder FOLDER`, and inherits a descriptor of the testbed's lock. It reports
readiness or failure as one JSON line on stdout. It ends on request, on SIGTERM, or, if it belongs to one command, when
its stdin is closed, so that a killed command leaves nothing behind.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

from testbed import state
from testbed.cgroups import block_devices, find_hierarchies, group_directories, make_group, remove_groups
from testbed.control import answer, listen
from testbed.network.backends import open_backend
from testbed.processes import kill_all
from testbed.state import DeviceRecord, TestbedRecord
from tpi.errors import TestbedError, TpiError
from tpi.topology.topology import Topology

TOPOLOGY = "topology.json"


class _Stop(BaseException):
    """Raised by the signal handler to end the process."""


def hold_testbed(folder: Path) -> None:
    """Set up the testbed at `folder`, serve it until a request or signal ends it, and remove it."""
    record = state.read(folder)
    try:
        topology = Topology.from_dict(json.loads((folder / TOPOLOGY).read_text()))
        backend = open_backend(topology, record.backend)
        record = _enrol(folder, record, topology, backend.namespaces, backend.mtu)
        _prioritise()
        server = listen(folder)
        _report({"ready": True})
        handlers = {**backend.handlers(), "down": lambda: None}
        others: dict[int, Callable[[], bool]] = {server.fileno(): lambda: answer(server, handlers) != "down"}
        if record.owner == "run":
            others[0] = lambda: bool(os.read(0, 1))
        backend.serve(others)
    except _Stop:
        pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        remove(folder, state.read(folder))


def remove(folder: Path, record: TestbedRecord) -> None:
    """End every process of a testbed, and remove the testbed's files and cgroups.

    Raises:
        TestbedError: if a process or a cgroup cannot be removed.
    """
    if not kill_all(record):
        raise TestbedError(f"some processes of testbed {record.id} do not end; run `tpi testbed down` to try again")
    if left := remove_groups(record.rubbish):
        raise TestbedError(f"the cgroup {left[0]} cannot be removed; run `tpi testbed down` to try again")
    if record.scratch:
        shutil.rmtree(record.scratch, ignore_errors=True)
    state.discard(folder)


def _enrol(folder: Path, record: TestbedRecord, topology: Topology, namespaces: list[int], mtu: int) -> TestbedRecord:
    """Create the cgroups and the scratch directory of a testbed. Store and return the complete record of the testbed.

    Before that, store a record of everything that may have to be removed, in case this process is killed.
    """
    hierarchies, disks = find_hierarchies(), block_devices()
    group = f"tpi-{record.id}"
    names = [device.name for device in topology.devices]
    scratch = Path(tempfile.gettempdir(), f"tpi-testbed-{record.id}")
    left = group_directories(hierarchies, group, names)
    record = replace(record, holder=os.getpid(), mtu=mtu, scratch=str(scratch), rubbish=left)
    state.write(folder, record)
    scratch.mkdir(mode=0o700)
    for device, namespace in zip(topology.devices, namespaces, strict=True):
        host = DeviceRecord(
            device.name,
            topology.address(device.name),
            f"/proc/{os.getpid()}/fd/{namespace}",
            make_group(hierarchies, group, device, disks),
        )
        record = replace(record, devices=(*record.devices, host))
    state.write(folder, record)
    return record


def _prioritise() -> None:
    """Give this process real-time priority, so that it runs before the devices' programs when a packet is due.

    This process sleeps most of the time, so the programs still get their cores.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:
        with suppress(OSError):  # without either it is less punctual, which the verification reports
            os.setpriority(os.PRIO_PROCESS, 0, -20)


def _report(message: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _stop(number: int, frame: FrameType | None) -> None:
    raise _Stop


def main() -> None:
    """Run the holder process until the testbed ends."""
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        hold_testbed(Path(sys.argv[1]))
    except (OSError, TpiError) as error:
        _report({"error": str(error)})
        sys.exit(1)


if __name__ == "__main__":
    main()
