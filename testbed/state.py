"""What is known of each testbed on this machine: one directory under /run, held by a lock for as long as it lives.

The holder process keeps `lock` locked, so whether a testbed is alive can be asked without trusting process ids.
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
_MAKING = 10.0  # seconds that making a directory and locking it may take at most


@dataclass(frozen=True)
class HostProcess:
    """One device of a running testbed."""

    name: str
    address: str
    namespace: str  # path that opens its network namespace, through the holder's descriptors
    cgroups: tuple[str, ...] = ()  # directories to join; they carry the limits


@dataclass(frozen=True)
class TestbedRecord:
    """What other processes need in order to use, harm or remove a testbed."""

    id: str
    topology: str
    backend: str  # "tc" or "tun"
    owner: str  # "up": lives until it is taken down; "run": lives as long as one command
    holder: int = 0  # process id
    mtu: int = 1500
    scratch: str = ""  # directory on disk for what the devices store; removed with the testbed
    devices: tuple[HostProcess, ...] = ()
    rubbish: tuple[str, ...] = field(default=())  # cgroup directories to remove, children first

    def host(self, name: str) -> HostProcess:
        """Raises TestbedError, listing the names, if no device is called `name`."""
        for host in self.devices:
            if host.name == name:
                return host
        known = ", ".join(host.name for host in self.devices)
        raise TestbedError(f"testbed {self.id} has no device {name!r}; it has {known}")


def default_root() -> Path:
    """Where state directories are: /run, which a reboot empties, or the temporary directory."""
    run = Path("/run")
    return (run if run.is_dir() and os.access(run, os.W_OK) else Path(tempfile.gettempdir())) / "tpi-testbed"


def new_folder(root: Path) -> Path:
    """Make the directory of a new testbed; its name is the testbed's random id."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = root / secrets.token_hex(4)
    folder.mkdir(mode=0o700)
    return folder


def hold(folder: Path) -> int:
    """Lock the testbed at `folder` while any process has the returned descriptor open; children may inherit it."""
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def alive(folder: Path) -> bool:
    """Whether some process holds the testbed at `folder`."""
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
    """Whether it may be a testbed whose maker is about to lock it."""
    try:
        return time.time() - folder.stat().st_mtime < _MAKING
    except FileNotFoundError:
        return False


def write(folder: Path, record: TestbedRecord) -> None:
    """Replace the record at `folder` in one step."""
    fresh = folder / (_RECORD + ".new")
    fresh.write_text(json.dumps(asdict(record), indent=1))
    fresh.replace(folder / _RECORD)


def read(folder: Path) -> TestbedRecord:
    """The record at `folder`. Raises TestbedError if it is missing or damaged."""
    try:
        fields: dict[str, Any] = json.loads((folder / _RECORD).read_text())
        fields["devices"] = tuple(_member(device) for device in fields["devices"])
        fields["rubbish"] = tuple(fields["rubbish"])
        return TestbedRecord(**fields)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TestbedError(f"there is no usable testbed at {folder}: `tpi testbed down` clears it up") from error


def _member(fields: dict[str, Any]) -> HostProcess:
    return HostProcess(**{**fields, "cgroups": tuple(fields["cgroups"])})


def folders(root: Path) -> list[Path]:
    """The directories of all testbeds under `root`, dead or alive."""
    return sorted(entry for entry in root.iterdir() if entry.is_dir()) if root.is_dir() else []


def find(root: Path, name: str | None) -> Path:
    """The directory of the testbed `name`, or of the only one alive.

    Raises:
        TestbedError: if there is none, or several and no name.
    """
    living = [folder for folder in folders(root) if alive(folder)]
    if name is not None:
        living = [folder for folder in living if folder.name == name]
    if not living:
        which = f"testbed {name}" if name else "testbed"
        raise TestbedError(f"no {which} is running: start one with `tpi testbed up FILE`")
    if len(living) > 1:
        names = ", ".join(folder.name for folder in living)
        raise TestbedError(f"several testbeds are running ({names}): say which with --id")
    return living[0]


def discard(folder: Path) -> None:
    """Remove the directory of a testbed."""
    shutil.rmtree(folder, ignore_errors=True)
