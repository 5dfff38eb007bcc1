"""Search and signalling of all processes that run on the devices of a testbed, however they were started.

A process belongs to a device if it is in one of the device's cgroups, or has the testbed's random id in its
environment, which children inherit. Neither depends on the process that started it.
"""

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from testbed.state import DeviceRecord, TestbedRecord

MARK, DEVICE = "TPI_TESTBED", "TPI_DEVICE"


def marked(record: TestbedRecord, device: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` with the two variables by which `processes` finds a process of `device`."""
    return {**environment, MARK: record.id, DEVICE: device}


def processes(record: TestbedRecord, host: DeviceRecord | None = None) -> set[int]:
    """Return the ids of the processes that run on the device `host` of the testbed `record`; None: on all devices."""
    devices = record.devices if host is None else (host,)
    found = {
        int(line) for device in devices for folder in device.cgroups for line in _lines(Path(folder, "cgroup.procs"))
    }
    wanted = {f"{MARK}={record.id}".encode()}
    if host is not None:
        wanted.add(f"{DEVICE}={host.name}".encode())
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and wanted <= _environment(entry):
            found.add(int(entry.name))
    return found - {0, os.getpid()}


def signal_all(record: TestbedRecord, host: DeviceRecord | None, number: signal.Signals, patience: float = 2.0) -> int:
    """Signal every process of a device or testbed, including those that start meanwhile.

    Return how many were signalled.
    """
    seen: set[int] = set()
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        fresh = processes(record, host) - seen
        if not fresh:
            break
        for process in fresh:
            with suppress(ProcessLookupError):
                os.kill(process, number)
        seen |= fresh
    return len(seen)


def kill_all(record: TestbedRecord, host: DeviceRecord | None = None, patience: float = 5.0) -> bool:
    """Kill every process of a device or testbed. Return False if a process is left after `patience` seconds."""
    deadline = time.monotonic() + patience
    while alive := {process for process in processes(record, host) if _runs(process)}:
        if time.monotonic() > deadline:
            return False
        for process in alive:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.005)
    return True


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


def _environment(process: Path) -> set[bytes]:
    try:
        return set((process / "environ").read_bytes().split(b"\0"))
    except OSError:
        return set()


def _runs(process: int) -> bool:
    """Return True if the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
