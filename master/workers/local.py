"""Worker processes on this machine, for `--local N` and for further cards: on free ports, each with its own cache.

A worker exits when its stdin closes, which the operating system does even if this process is killed.
"""

import os
import re
import selectors
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from tpi.errors import NodeLost, UsageError, WeightsError
from tpi.system.modules import module_command
from tpi.system.openfiles import require_open_files, way_to_write
from tpi.system.private import make_private, private

START_S = 30.0
STOP_S = 8.0
COMMAND = module_command("tpi.cli", "worker")
_ADDRESS = re.compile(rb"listens on (\S+:\d+)")
_LOG_LINES = 5  # lines of the log that are shown for a worker that did not start
_CACHE_WAY = "set TPI_CACHE, or --cache, to a directory that can be written"
_FILES, _FILES_EACH = 40, 14  # open files of a run, and of each worker


class LocalWorkers:
    """Some worker processes; a context manager. `addresses` is known once it is entered."""

    def __init__(
        self,
        arguments: Sequence[Sequence[str]],
        cache: Path,
        threads: int = 0,
        memory: int = 0,
        command: Sequence[str] = COMMAND,
    ) -> None:
        """Prepare one process for each of `arguments`, the further command-line arguments of that worker.

        `threads` and `memory` (bytes) are limits of each worker; 0 lets the worker choose.
        """
        self.addresses: list[str] = []
        self._command = command
        self._limits = [
            *(["-t", str(threads)] if threads else []),
            *(["--memory", f"{memory}B"] if memory else []),
        ]
        self._arguments = {cache / "local" / f"worker-{at}": list(own) for at, own in enumerate(arguments, 1)}
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "LocalWorkers":
        """Start the workers, and wait until they listen.

        Raises:
            NodeLost: if one does not start; the message has the end of its log.
            UsageError: if loopback connections fail, or this machine allows too few open files.
        """
        files = _FILES + _FILES_EACH * len(self._arguments)
        require_open_files(files, "--local", ", or give a smaller --local")
        _require_loopback()
        try:
            for cache, own in self._arguments.items():
                self._processes.append(self._start(cache, own))
            self.addresses = [self._address(*pair) for pair in zip(self._processes, self._arguments, strict=True)]
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Close the workers' stdin and wait until they exit; kill those that do not."""
        for process in self._processes:
            for pipe in (process.stdin, process.stdout):
                _close(pipe)
        ends = time.monotonic() + STOP_S
        for process in self._processes:
            _wait(process, ends)
        self._processes = []

    def _start(self, cache: Path, own: Sequence[str]) -> subprocess.Popen[bytes]:
        arguments = ["--listen", "127.0.0.1:0", "--name", cache.name, "--cache", str(cache), "--attached"]
        environment = {name: value for name, value in os.environ.items() if name != "TPI_CACHE_LIMIT"}
        with _opened_log(cache) as log:  # the master's limit covers the whole cache, not each worker's part
            # its own session: Ctrl-C reaches only the master, which then stops its workers
            return subprocess.Popen(
                [*self._command, *arguments, *self._limits, *own],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
                env=environment,
            )  # fmt: skip

    def _address(self, process: subprocess.Popen[bytes], cache: Path) -> str:
        assert process.stdout
        ends = time.monotonic() + START_S
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            line = b""
            while selector.select(max(0.0, ends - time.monotonic())):
                chunk = process.stdout.read1(4096)  # type: ignore[attr-defined]
                line += chunk
                if not chunk or b"\n" in line:
                    break
        found = _ADDRESS.search(line)
        if found is None:
            said = b" ".join(_log(cache).read_bytes().splitlines()[-_LOG_LINES:]).decode(errors="replace")
            raise NodeLost(cache.name, f"{cache.name} did not start: {said or 'its log is empty'} (log: {_log(cache)})")
        return found[1].decode()


def _require_loopback() -> None:
    """Check that loopback connections work, which the workers need.

    Raises:
        UsageError: if a loopback connection fails.
    """
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), START_S).close()
    except OSError as error:
        raise UsageError(
            f"--local needs the loopback interface, and 127.0.0.1 cannot be reached ({error.strerror or error}); bring "
            "it up (ip link set lo up), or run without --local"
        ) from error


def _log(cache: Path) -> Path:
    return cache / "worker.log"


def _opened_log(cache: Path) -> IO[bytes]:
    try:
        make_private(cache)
        return open(_log(cache), "wb", opener=private)
    except OSError as error:
        reason = f"cannot use {cache} for a local worker: {error.strerror or error}"
        raise WeightsError(f"{reason}; {way_to_write(error, _CACHE_WAY)}") from error


def _wait(process: subprocess.Popen[bytes], ends: float) -> None:
    try:
        process.wait(max(0.0, ends - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _close(pipe: IO[bytes] | None) -> None:
    if pipe is not None:
        pipe.close()
