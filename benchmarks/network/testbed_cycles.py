"""Repeated start and stop of a testbed, and a count of everything left behind.

`python -m benchmarks.network.testbed_cycles [CYCLES]`. It counts, on the whole machine before and after, cgroup
directories, processes, network namespaces in use, and mounts. A TUN device exists only as long as
its descriptor is open, so it is not counted separately.
"""

import subprocess
import sys
import time
from pathlib import Path

from testbed.cgroups import find_hierarchies
from testbed.launch import Testbed
from tpi.topology.schema import load_topology


def left_behind() -> dict[str, int]:
    """Count everything on this machine that a testbed creates."""
    hierarchies = find_hierarchies()
    roots = [hierarchies.unified] if hierarchies.unified else list(hierarchies.version1.values())
    processes = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return {
        "cgroups": sum(1 for root in roots for _ in root.glob("tpi-*")),
        "processes": sum(_is_ours(process) for process in processes),
        "namespaces": len({link for process in processes if (link := _namespace(process))}),
        "scratch directories": sum(1 for _ in Path("/tmp").glob("tpi-testbed-*")),
        "mounts": len(Path("/proc/mounts").read_text().splitlines()),
    }


def _is_ours(process: Path) -> bool:
    try:
        return b"testbed.holder" in (process / "cmdline").read_bytes()
    except OSError:
        return False


def _namespace(process: Path) -> str:
    try:
        return str((process / "ns" / "net").readlink())
    except OSError:
        return ""


def _sleeper(bed: Testbed, device: str) -> "subprocess.Popen[bytes]":
    """Start a long-lived process on `device`, and return it once it runs."""
    process = bed.popen(device, ["sh", "-c", "echo; exec sleep 1000"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        process.stdout.readline()
    return process


def main() -> None:
    """Run the cycles and print the counts."""
    cycles = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    topology = load_topology("paper-8-devices")
    before, started = left_behind(), time.perf_counter()
    for _ in range(cycles):
        with Testbed.start(topology) as bed:
            sleepers = [_sleeper(bed, device.name) for device in topology.devices[:2]]
        for sleeper in sleepers:
            sleeper.wait()
    seconds = time.perf_counter() - started
    after = left_behind()
    print(f"{cycles} ups and downs of {len(topology.devices)} devices in {seconds:.1f} s")
    for name, count in after.items():
        print(f"  {name}: {before[name]} before, {count} after")
    sys.exit(after != before)


if __name__ == "__main__":
    main()
