"""Records of the testbeds on this machine: a directory under /run for each, with a lock that is held while it runs.

The holder process keeps the file `lock` locked, so that the test whether a testbed runs does not depend on process ids.
"""

import fcntl
import json
import os
import secrets
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tpi.errors import TestbedError

_RECORD, _LOCK = "state.json", "lock"
_MAKING = 10.0  # most seconds between creating a directory and locking it


@dataclass(frozen=True)
class DeviceRecord:
    """One device of a running testbed."""

    name: str
    address: str
    namespace: str  # path that opens its network namespace, through the holder's descriptors
    cgroups: tuple[str, ...] = ()  # directories to join; they carry the limits


@dataclass(frozen=True)
class TestbedRecord:
    """Data with which other processes use, disturb or remove a testbed."""

    id: str
    topology: str
    backend: str  # "tc" or "tun"
    owner: str  # "up": lives until it is taken down; "run": lives as long as one command
    holder: int = 0  # process id
    mtu: int = 1500
    scratch: str = ""  # directory on disk for the devices' files; removed with the testbed
    devices: tuple[DeviceRecord, ...] = ()
    rubbish: tuple[str, ...] = field(default=())  # cgroup directories to remove, children first

    def host(self, name: str) -> DeviceRecord:
        """Return the device called `name`.

        Raises:
            TestbedError: if no device has this name. The message lists the names.
        """
        for host in self.devices:
            if host.name == name:
                return host
        known = ", ".join(host.name for host in self.devices)
        raise TestbedError(f"testbed {self.id} has no device {name!r}; it has {known}")


def default_root() -> Path:
    """Return the parent of all state directories: in /run, which a reboot empties, or in the temporary directory."""
    run = Path("/run")
    return (run if run.is_dir() and os.access(run, os.W_OK) else Path(tempfile.gettempdir())) / "tpi-testbed"


def new_folder(root: Path) -> Path:
    """Create the directory of a new testbed. Its name is the testbed's random id."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = root / secrets.token_hex(4)
    folder.mkdir(mode=0o700)
    return folder


def lock(folder: Path) -> int:
    """Lock the testbed at `folder`.

    The lock lasts until every process has closed the returned descriptor, which children may inherit.
    """
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def alive(folder: Path) -> bool:
    """Return True if a process holds the testbed at `folder`."""
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return _young(folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _young(folder: Path) -> bool:
    """Return True if the directory is so new that the process that made it may still be about to lock it."""
    try:
        return time.time() - folder.stat().st_mtime < _MAKING
    except FileNotFoundError:
        return False


def write(folder: Path, record: TestbedRecord) -> None:
    """Replace the record at `folder` atomically."""
    fresh = folder / (_RECORD + ".new")
    fresh.write_text(json.dumps(asdict(record), indent=1))
    fresh.replace(folder / _RECORD)


def read(folder: Path) -> TestbedRecord:
    """Return the record at `folder`.

    Raises:
        TestbedError: if it is missing or damaged.
    """
    try:
        fields: dict[str, Any] = json.loads((folder / _RECORD).read_text())
        fields["devices"] = tuple(_member(device) for device in fields["devices"])
        fields["rubbish"] = tuple(fields["rubbish"])
        return TestbedRecord(**fields)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TestbedError(f"there is no usable testbed at {folder}: run `tpi testbed down` to remove it") from error


def _member(fields: dict[str, Any]) -> DeviceRecord:
    return DeviceRecord(**{**fields, "cgroups": tuple(fields["cgroups"])})


def folders(root: Path) -> list[Path]:
    """Return the directories of all testbeds under `root`, whether they run or not."""
    return sorted(entry for entry in root.iterdir() if entry.is_dir()) if root.is_dir() else []


def find(root: Path, name: str | None) -> Path:
    """Return the directory of the running testbed `name`; if `name` is None, of the only testbed that runs.

    Raises:
        TestbedError: if no such testbed runs, or `name` is None and several run.
    """
    living = [folder for folder in folders(root) if alive(folder)]
    if name is not None:
        living = [folder for folder in living if folder.name == name]
    if not living:
        which = f"testbed {name}" if name else "testbed"
        raise TestbedError(f"no {which} is running: start one with `tpi testbed up FILE`")
    if len(living) > 1:
        names = ", ".join(folder.name for folder in living)
        raise TestbedError(f"several testbeds are running ({names}): choose one with --id")
    return living[0]


def discard(folder: Path) -> None:
    """Remove the directory of a testbed."""
    shutil.rmtree(folder, ignore_errors=True)
