"""A child process that lists the graphics chips, or tries one: a crash of a driver ends only the child.

Results are cached, per version of drivers and libraries. A trial that a driver refused is not cached: the user may have
removed the cause, and the next trial is quick.
"""

import json
import os
import platform
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tpi.config import default_cache
from tpi.devices.failures import reason
from tpi.errors import DeviceError, TpiError
from tpi.system.atomic import write_atomically
from tpi.system.modules import module_command
from tpi.system.private import make_private

_FILE = "chips.json"
_FRESH_S = 30 * 24 * 3600.0
_DEADLINE_S = 120.0  # compilers of graphics drivers take their time
_COMMAND = module_command("tpi.devices.child")
_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/etc/OpenCL/vendors"))
_LIBRARIES = ("torch", "triton", "pyopencl")
_SENT = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)  # a child that they end did not crash


class _LostError(DeviceError):
    """Error of a child process that crashed, or did not answer in time."""


def list_chips() -> list[str]:
    """Return the names of the graphics chips that OpenCL offers.

    Raises:
        DeviceError: if its library or a driver fails.
    """
    return [str(name) for name in _remembered("list")]


def try_chip(name: str) -> None:
    """Check that the chip called `name` opens and computes a block.

    Raises:
        DeviceError: if the chip does not; the message gives the reason.
    """
    _remembered("try", name)


def _remembered(*request: str) -> list[Any]:
    key = " ".join((*request, "with", *_drivers()))
    known = _load()
    if key not in known:
        answer, lasts = _answered(*request)
        if not lasts:
            return _result(answer)
        known[key] = {"at": time.time(), "answer": answer}
        _save(known)
    return _result(known[key]["answer"])


def _answered(*request: str) -> tuple[dict[str, Any], bool]:
    """Return the child's answer, and True if the answer should be cached."""
    try:
        answer = _ask(*request)
    except _LostError as error:
        return {"failure": str(error)}, True
    return answer, "failure" not in answer


def _result(answer: dict[str, Any]) -> list[Any]:
    if "failure" in answer:
        raise DeviceError(str(answer["failure"]))
    return list(answer["result"])


def _ask(*request: str) -> dict[str, Any]:
    """Run the child and return its answer; drop its other output.

    Raises:
        DeviceError: if the child fails, crashes or does not answer in time.
    """
    try:
        done = subprocess.run(
            [*_COMMAND, *request], capture_output=True, stdin=subprocess.DEVNULL, timeout=_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise _LostError(f"its driver did not answer within {_DEADLINE_S:.0f} s") from error
    if done.returncode < 0:
        if -done.returncode in _SENT:
            raise DeviceError(f"the process that tried it was ended ({_signal(-done.returncode)})")
        raise _LostError(f"its driver crashed ({_signal(-done.returncode)})")
    lines = done.stdout.decode(errors="replace").splitlines()
    with suppress(ValueError, IndexError):
        answer = json.loads(lines[-1])
        if isinstance(answer, dict) and answer:
            return answer
    raise _LostError(f"its driver ended the process that tried it (exit code {done.returncode})")


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _drivers() -> list[str]:
    """Return the facts on which a trial depends: kernel release, driver files, and versions of libraries."""
    return [platform.release(), *map(_stamp, _DRIVERS), *map(_version, _LIBRARIES)]


def _stamp(path: Path) -> str:
    with suppress(OSError):
        if path.is_dir():
            return ",".join(sorted(f"{each.name}@{each.stat().st_mtime_ns}" for each in path.iterdir()))
        return " ".join(path.read_text().split())
    return "none"


def _version(library: str) -> str:
    try:
        return f"{library} {version(library)}"
    except PackageNotFoundError:
        return f"no {library}"


def _load() -> dict[str, Any]:
    """Return the cached results that are still fresh; a file that cannot be read counts as empty."""
    with suppress(OSError, ValueError, AttributeError, LookupError, TypeError, TpiError):
        known = json.loads((default_cache() / _FILE).read_text())
        return {key: each for key, each in known.items() if _good(each)}
    return {}


def _good(record: Any) -> bool:
    answer = record.get("answer")
    known = isinstance(answer, dict) and (isinstance(answer.get("result"), list) or "failure" in answer)
    return known and 0 <= time.time() - float(record["at"]) < _FRESH_S


def _save(known: dict[str, Any]) -> None:
    with suppress(OSError, TpiError):
        cache = default_cache()
        make_private(cache)
        write_atomically(cache / _FILE, json.dumps(known, indent=1).encode())


def _opencl_chips() -> list[str]:
    from tpi.devices.opencl.discover import find_devices, is_gpu

    return [f"opencl:{index}" for index, device in enumerate(find_devices()) if is_gpu(device)]


def _try(name: str) -> list[str]:
    """Let the chip `name` compute a small block of 4-bit weights, for one token and for a prompt."""
    from contextlib import closing

    import numpy as np

    from tpi.devices.choose import open_device
    from tpi.kernels.spec import FfnSpec, NormSpec
    from tpi.pack.layout import Part, RunLayout

    parts = (Part("gate", "q4", "row"), Part("up", "q4", "row"), Part("down", "q4", "column"))
    run = RunLayout("neuron", "tiled", parts, 32, 64, 2)
    spec = FfnSpec(run, "silu", True, NormSpec("rms", 1e-5, np.ones(64, np.float32)), None, None)
    weights = np.ones(run.units * run.unit_bytes, np.uint8)
    with closing(open_device(name)) as device:
        there = device.memory.allocate(weights.size)
        device.copy(weights, there).wait()
        for tokens in (1, 32):
            x = np.ones((tokens, 64), np.float32)
            found = device.start(partial(device.kernels.ffn, spec, there, x)).wait()
            if not np.isfinite(found).all():
                raise DeviceError("it computes values that are not finite numbers")
    return []


def main(request: str, *names: str) -> None:
    """Answer on the last line of stdout, as JSON: `result`, or `failure` with the reason."""
    try:
        answer: dict[str, Any] = {"result": _opencl_chips() if request == "list" else _try(*names)}
    except Exception as error:  # noqa: BLE001 - any failure is the answer
        answer = {"failure": reason(error)}
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)  # a driver's errors at the end of a process do not count


if __name__ == "__main__":
    main(*sys.argv[1:])
