"""A report of the features of this machine that a testbed can use. The doctor tries each feature."""

import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from testbed.cgroups import CONTROLLERS, block_devices, find_hierarchies
from testbed.network.namespaces import CONGESTION, congestion_control, inside, new_namespace, open_tun
from testbed.network.qdisc import has_netem, has_qdisc
from tpi.topology.topology import PREFIX, SUBNET

_TUN = "/dev/net/tun"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report.

    Attributes:
        what: the feature.
        good: True if the feature works, False if it does not, None if a testbed does not depend on it.
        meaning: the consequence for a testbed, or the way to fix the problem.
        needed: True if no testbed can be created without the feature.
    """

    what: str
    good: bool | None
    meaning: str
    needed: bool = False


def examine() -> Iterator[Finding]:
    """Try all features that a testbed uses. Skip those that need a namespace if none can be created."""
    obstacles = list(_obstacles())
    yield from obstacles
    if not any(one.good is False for one in obstacles):
        yield from _in_namespaces()
    yield from _cgroups()
    yield _priority()
    yield _timers()


def _obstacles() -> Iterator[Finding]:
    """Yield findings on whether this process may create namespaces and TUN devices.

    Each obstacle comes with advice.
    """
    if not Path("/proc/self/ns/net").exists():
        yield Finding("Linux", False, "this system has no network namespaces; use a machine with Linux", True)
        return
    root = os.geteuid() == 0
    found = "yes" if root else f"no, this is user {os.geteuid()}; run it with sudo"
    yield Finding("root", root, found, True)
    if not Path(_TUN).exists():
        way = "run `modprobe tun` as root (in a container: start it with --device /dev/net/tun)"
        yield Finding("TUN devices", False, f"{_TUN} does not exist; {way}", True)
    if root:
        yield _namespaces()


def _namespaces() -> Finding:
    try:
        os.close(new_namespace())
    except OSError as error:
        way = "in a container, start it with --privileged"
        return Finding("network namespaces", False, f"cannot be created: {error.strerror or error}; {way}", True)
    return Finding("network namespaces", True, "can be created", True)


def _in_namespaces() -> Iterator[Finding]:
    yield _tun()
    for kind in ("netem", "tbf", "htb"):
        yes = has_qdisc(kind)
        yield Finding(f"queueing discipline {kind}", yes if kind == "tbf" else None, "present" if yes else "absent")
    used = "tc (netem and tbf)" if has_netem() else "tun (the user-space link), since there is no netem"
    yield Finding("links are shaped by", None, used)
    yield _congestion()


def _tun() -> Finding:
    namespace = new_namespace()
    try:
        with inside(namespace):
            os.close(open_tun(f"{SUBNET}.1", PREFIX, 9000, True))
    except OSError as error:
        return Finding(
            "TUN devices", False, f"cannot be created: {error}; in a container, start it with --privileged", True
        )
    finally:
        os.close(namespace)
    return Finding("TUN devices", True, "can be created", True)


def _congestion() -> Finding:
    namespace = new_namespace()
    try:
        with inside(namespace):
            used = congestion_control()
    finally:
        os.close(namespace)
    return Finding("congestion control of devices", used in CONGESTION, used)


def _cgroups() -> Iterator[Finding]:
    controllers = find_hierarchies().controllers()
    for name in CONTROLLERS:
        version = controllers.get(name)
        meaning = (
            f"cgroup {version}"
            if version
            else f"no controller: topologies that limit it are refused; mount cgroup2 with {name}"
        )
        yield Finding(f"limits of {name}", version is not None, meaning)
    disks = ", ".join(block_devices())
    yield Finding("disks that can be slowed", bool(disks), disks or "none: disk limits have no effect")
    yield Finding("cores", None, f"{os.cpu_count()}; a device's `cpu` beyond that has no effect")


def _priority() -> Finding:
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    except OSError:
        return Finding(
            "real-time priority",
            False,
            "refused: links are less punctual while devices compute; run as root with CAP_SYS_NICE",
        )
    return Finding("real-time priority", True, "granted to the link process")


def _timers() -> Finding:
    late = []
    for _ in range(50):
        started = time.perf_counter()
        time.sleep(0.001)
        late.append(time.perf_counter() - started - 0.001)
    middle = statistics.median(late) * 1e3
    return Finding("timers", middle < 0.2, f"a sleep of 1 ms ends {middle:.2f} ms late")
