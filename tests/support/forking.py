"""Real processes without the time of their imports: a process that has imported TPI forks them.

`forked_programs` makes `subprocess.Popen` start TPI's programs in this way, also those that a started program starts
itself. They are children of the process that starts them, with the usual descriptors, signals and sessions; only what
Python does before the program begins is left out. Other commands start as usual. So do TPI's programs if a fork cannot
follow an option of Popen or an environment variable, and in tests that are marked `bare`.
"""

import ctypes
import fcntl
import inspect
import json
import os
import resource
import runpy
import socket
import subprocess
import sys
import termios
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any

from master.confined import process as confined
from tests.support.paths import ROOT
from tpi.system import modules

OWN_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
)
"""Python code of a process that makes its standard input its terminal and then runs its arguments."""
_FORKER = "tests.support.processes.forker"
_PROGRAMS = ("tpi.cli", "worker.commands")
_READ_AT_START = ("PYTHON", "OMP_", "MKL_", "LC_", "LANG", "LD_", "GLIBC_")  # begins of names of variables
_PR_SET_CHILD_SUBREAPER = 36
_LIMITS = tuple(number for name, number in vars(resource).items() if name.startswith("RLIMIT_"))
_FIRST = 4096  # bytes of a request that are sent with its descriptors
_execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_OPTIONS = tuple(inspect.signature(_execute).parameters)[1:]
_USUAL = {
    "preexec_fn": None, "close_fds": True, "pass_fds": (), "shell": False, "gid": None, "gids": None, "uid": None,
    "umask": -1, "process_group": -1,
}  # fmt: skip
_allowed = True


class Forker:
    """A connection to a process that forks programs. Thread-safe."""

    def __init__(self, connection: socket.socket | None = None) -> None:
        """Use the forker at the other end of `connection`; None: start one with the first program."""
        self._connection = connection
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = Lock()

    def start(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> int | None:
        """Start a program as a child of this process; return its process id, or None if that failed."""
        data = json.dumps(request).encode()
        with self._lock:
            connection = self._connection = self._connection or self._begun()
            try:
                _adopt(True)
                first = len(data).to_bytes(8, "little") + data[:_FIRST]
                socket.send_fds(connection, [first], list(descriptors))
                connection.sendall(data[_FIRST:])
                return int.from_bytes(connection.recv(8), "little") or None
            except OSError:
                return None
            finally:
                _adopt(False)

    def close(self) -> None:
        """End the forker. Programs that it started go on."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.wait()

    def _begun(self) -> socket.socket:
        mine, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", _FORKER, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        return mine


@contextmanager
def forked_programs() -> Iterator[None]:
    """Start TPI's programs by forks during the block, on Linux."""
    forker = Forker()
    if sys.platform == "linux":
        install(forker)
    try:
        yield
    finally:
        subprocess.Popen._execute_child = _execute  # type: ignore[attr-defined]
        forker.close()


def allow_forks(allowed: bool) -> None:
    """Allow forks from now on, or start all programs as usual."""
    global _allowed
    _allowed = allowed


def install(forker: Forker) -> None:
    """Make `subprocess.Popen` start TPI's programs with `forker`."""

    def execute(process: Any, *given: Any) -> None:
        options = dict(zip(_OPTIONS, given, strict=True))
        command = [os.fsdecode(part) for part in options["args"]] if isinstance(options["args"], list | tuple) else []
        environment = dict(os.environ if options["env"] is None else options["env"])
        pid = None
        if _allowed and _may_fork(command, options, environment):
            ends = [options[name] for name in ("p2cread", "c2pwrite", "errwrite")]
            inherited = [number if end < 0 else end for number, end in enumerate(ends)]
            pid = forker.start(_request(command, options, environment), inherited)
        if pid is None:
            _execute(process, *given)
            return
        process.pid, process._child_created = pid, True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        process._close_pipe_fds(*(options[name] for name in pipes))

    subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]


def run(command: Sequence[str]) -> None:
    """Run the program of a Python `command` in this process, as its `__main__`."""
    if command[2] == OWN_TERMINAL:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    sys.orig_argv, words = list(command), _words(command)
    flag, program, *arguments = words
    sys.modules.pop(_module(words), None)  # it runs anew, as `__main__`
    if flag == "-m":
        sys.path[0], sys.argv = str(Path.cwd()), [program, *arguments]
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv = "", ["-c", *arguments]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), vars(main))


def starts_programs(command: Sequence[str]) -> bool:
    """Return True if the program of `command` may start others: it is neither a worker nor a confined process."""
    return confined._RUN not in command and not any("worker" in word for word in _words(command)[:4])


def is_unbuffered(command: Sequence[str]) -> bool:
    """Return True if the Python `command` asks for unbuffered output."""
    return _flags(command)[:1] == ["-u"]


def _flags(command: Sequence[str]) -> list[str]:
    """Return all arguments of the Python that runs the program."""
    return list(command[4 if command[1:3] == ["-c", OWN_TERMINAL] else 1 :])


def _words(command: Sequence[str]) -> list[str]:
    """Return `-m` and a module, or `-c` and code, and the arguments of the program."""
    flags = _flags(command)
    return flags[1:] if flags[:1] == ["-u"] else flags


def _module(words: Sequence[str]) -> str:
    """Return the module that `words` of a Python command run as `__main__`; empty if there is none."""
    at = {"-m": 1, "-c": 2}.get(words[0] if words else "", 0)
    return words[at] if 0 < at < len(words) and (at == 1 or words[1] == modules._RUN) else ""


def _may_fork(command: Sequence[str], options: Mapping[str, Any], environment: Mapping[str, str]) -> bool:
    words = _words(command)
    module = _module(words)
    known = module in _PROGRAMS or module.startswith("tests.support.processes.") or words[1:2] == [confined._RUN]
    usual = all(options.get(name, value) in (value, None) for name, value in _USUAL.items())
    alike = _read_at_start(environment) == _read_at_start(os.environ)
    return command[:1] == [sys.executable] and known and module != _FORKER and usual and alike


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_READ_AT_START)}


def _request(command: list[str], options: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    umask = Path("/proc/self/status").read_text().partition("Umask:")[2].split()[0]
    return {
        "command": command,
        "environment": environment,
        "cwd": str(Path.cwd() if options["cwd"] is None else options["cwd"]),
        "session": bool(options["start_new_session"]),
        "limits": [(number, resource.getrlimit(number)) for number in _LIMITS],
        "cores": sorted(os.sched_getaffinity(0)),
        "umask": int(umask, 8),
    }


def _adopt(orphans: bool) -> None:
    """Let orphans among this process's descendants become its children, or no longer."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(orphans), 0, 0, 0)
