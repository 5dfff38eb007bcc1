"""Run a program on a device: `python -m testbed.enter FOLDER DEVICE PARENT COMMAND...`.

The process joins the device's cgroups and network namespace, marks its environment, and is replaced by the command. It
has no heavy imports, because it starts every emulated process.
"""

import os
import signal
import sys
from pathlib import Path

from testbed import state
from testbed.network.namespaces import die_with_parent, enter_namespace
from testbed.processes import marked
from tpi.errors import TestbedError
from tpi.system.streams import filter_output

NOT_FOUND = 127


def enter(folder: Path, device: str, parent: int, command: list[str]) -> None:
    """Replace this process by `command` on the device.

    If `parent` is not 0, the command is killed when the process `parent` ends.
    """
    if parent:
        die_with_parent(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # the parent ended before the call above
    record = state.read(folder)
    host = record.host(device)
    for group in host.cgroups:
        Path(group, "cgroup.procs").write_text("0")
    namespace = os.open(host.namespace, os.O_RDONLY | os.O_CLOEXEC)
    enter_namespace(namespace)
    os.execvpe(command[0], command, marked(record, device, os.environ))


def main() -> None:
    """Run the command line. If the command cannot start, print one sentence."""
    folder, device, parent, *command = sys.argv[1:]
    try:
        enter(Path(folder), device, int(parent), command)
    except (OSError, TestbedError) as error:
        filter_output()
        sys.stderr.write(f"tpi: cannot start {command[0]!r} on device {device}: {error}\n")
        sys.exit(NOT_FOUND)


if __name__ == "__main__":
    main()
