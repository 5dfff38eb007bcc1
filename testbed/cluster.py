"""A cluster on a testbed: `tpi worker` on every device but the first, and a command on the first."""

import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from testbed.launch import Testbed
from tpi.errors import TestbedError
from tpi.system.modules import module_command
from tpi.topology.topology import Host

WORKERS = "TPI_WORKERS"
PORT = 9990
_LISTENS = re.compile(r"\blistens on\b")  # words in the line that a worker logs when it is ready
_BARE_PROCESS = 256 << 20  # bytes of a device's memory that the worker's --memory leaves out
_POLL = 0.02  # seconds
_GRACE = 3.0  # seconds that a process has to end


@dataclass(frozen=True)
class HostWorkerOptions:
    """Options for starting the workers.

    Attributes:
        command: the command to run instead of `tpi worker`; it gets the same flags.
        cache: directory with one shard cache for each device, kept after the run. None: in the testbed's scratch
            directory.
        logs: directory with one log for each device, kept after the run. None: in the testbed's state directory.
        patience: seconds that a worker has to begin to listen.
    """

    command: tuple[str, ...] = module_command("tpi.cli", "worker")
    cache: Path | None = None
    logs: Path | None = None
    patience: float = 60.0


@contextmanager
def workers(bed: Testbed, options: HostWorkerOptions | None = None) -> Iterator[str]:
    """Start a worker on every device but the first, and stop them at the end. Yield the value for `TPI_WORKERS`.

    Raises:
        TestbedError: if a worker ends, or does not listen in time. The message quotes the last line of its log.
    """
    options = options or HostWorkerOptions()
    started: list[subprocess.Popen[Any]] = []
    try:
        logs = []
        for device in bed.topology.devices[1:]:
            log = _log(bed, options, device)
            logs.append(log)
            with log.open("wb") as file:
                command = [*options.command, *_flags(bed, options, device)]
                outputs: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
                started.append(bed.popen(device.name, command, start_new_session=True, **outputs))
        deadline = time.monotonic() + options.patience
        for device, process, log in zip(bed.topology.devices[1:], started, logs, strict=True):
            _await(device.name, process, log, deadline)
        yield ",".join(f"{bed.address(device.name)}:{PORT}" for device in bed.topology.devices[1:])
    finally:
        _stop(started)


@dataclass
class StopSignal:
    """A request to end this process: the number of the signal, or 0 if there was none."""

    signal: int = 0

    def check(self) -> None:
        """Raise SystemExit if a signal was received.

        The signal handler raises SystemExit too, but Python discards exceptions raised inside a destructor.
        """
        if self.signal:
            raise SystemExit(128 + self.signal)


def run(bed: Testbed, command: list[str], addresses: str, stop: StopSignal | None = None) -> int:
    """Run `command` on the first device with `TPI_WORKERS` set to `addresses`. Return its exit code.

    Ignore Ctrl-C at a terminal, so that the command can handle it: in `tpi chat` it stops an answer.

    Raises:
        TestbedError: if the testbed ends before the command does.
        SystemExit: if this process received a signal to end, as recorded in `stop`.
    """
    stop = stop or StopSignal()
    environment = {**os.environ, WORKERS: addresses}
    process = bed.popen(bed.topology.devices[0].name, command, env=environment)
    try:
        while process.poll() is None:
            stop.check()
            if bed.ended():
                raise TestbedError("the testbed's holder process ended, and the network with it: start again")
            try:
                _wait(process, 0.2)
            except KeyboardInterrupt:
                if not _has_terminal():
                    raise
    finally:
        _stop([process])
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _has_terminal() -> bool:
    """Return True if this process and its children are the foreground job of a terminal, which Ctrl-C interrupts."""
    try:
        with Path(os.ctermid()).open("rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


@contextmanager
def stop_on_signals() -> Iterator[StopSignal]:
    """Turn SIGTERM and SIGHUP into an exception inside the block, so that the testbed is taken down.

    The yielded object records the signal, even if the exception was lost.
    """
    stop = StopSignal()

    def leave(number: int, frame: FrameType | None) -> None:
        stop.signal = number
        stop.check()

    before: dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None] = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        before[number] = signal.signal(number, leave)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _flags(bed: Testbed, options: HostWorkerOptions, device: Host) -> list[str]:
    cache = (options.cache or Path(bed.record.scratch)) / device.name
    flags = ["--listen", f"{bed.address(device.name)}:{PORT}", "--name", device.name, "--cache", str(cache)]
    if device.memory is not None:
        flags += ["--memory", f"{max(device.memory - _BARE_PROCESS, device.memory // 2)}B"]
    return [*flags, "--threads", str(_threads(bed, device))]


def _threads(bed: Testbed, device: Host) -> int:
    """Return the number of cores of a device, but at most an equal share of this machine's cores.

    The share matters because all devices compute at once.
    """
    share = max((os.cpu_count() or 1) // len(bed.topology.devices), 1)
    return share if device.cpu is None else min(math.ceil(device.cpu), share)


def _log(bed: Testbed, options: HostWorkerOptions, device: Host) -> Path:
    folder = options.logs or bed.folder
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{device.name}.log"


def _await(name: str, process: "subprocess.Popen[Any]", log: Path, deadline: float) -> None:
    """Wait until the log of the worker `name` shows that the worker listens.

    Raises:
        TestbedError: if the worker ends before, or does not listen by `deadline`.
    """
    while True:
        ended = process.poll()
        text = log.read_text(errors="replace")
        if _LISTENS.search(text):
            return
        last = next((line for line in reversed(text.splitlines()) if line.strip()), "its log is empty")
        if ended is not None:
            raise TestbedError(
                f"the worker on {name} ended with code {ended} before it listened; the last line of its log: {last}"
            )
        if time.monotonic() > deadline:
            raise TestbedError(f"the worker on {name} took too long to listen; the last line of its log: {last}")
        time.sleep(_POLL)


def _stop(processes: "list[subprocess.Popen[Any]]") -> None:
    """Ask all processes to end, then kill the ones that still run after `_GRACE` seconds."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
    for process in processes:
        _wait(process, _GRACE)
        if process.poll() is None:
            process.kill()
            # with a limit, because an exception from a signal handler can leave Popen's own lock held
            _wait(process, _GRACE)


def _wait(process: "subprocess.Popen[Any]", seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
