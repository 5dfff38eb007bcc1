"""Homes for benchmarks: emulated networks, with `tpi bench` on the first device and workers on all others."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

from testbed.checks.verify import verify
from testbed.cluster import WORKERS, HostWorkerOptions, workers
from testbed.launch import Testbed
from tpi.config import default_cache
from tpi.errors import TestbedError
from tpi.topology.links import Link as EndToEnd
from tpi.topology.links import LinkTable
from tpi.topology.schema import load_topology
from tpi.topology.topology import Host, HostLink, Topology, star

BENCH = [sys.executable, "-m", "tpi.cli", "bench", "--json", "-t", "1", "--split", "equal"]
MEGABIT = 1e6
MILLISECOND = 1e-3
_QUIET_S = 120  # seconds to wait for a shared machine to emulate the network as specified


class Home:
    """A running home whose workers wait for a master."""

    def __init__(self, bed: Testbed, addresses: str, logs: Path) -> None:
        self.bed, self.addresses, self._logs = bed, addresses, logs

    def bench(self, model: str, *flags: object) -> dict[str, Any]:
        """Run `tpi bench --json` on the first device and return its fields."""
        printed = self.run([*BENCH, "-m", model, *map(str, flags)])
        fields: dict[str, Any] = json.loads(printed.splitlines()[-1])
        return fields

    def plan(self, model: str, *flags: object) -> dict[str, Any]:
        """Run `tpi plan --json` for this home on the first device and return its fields."""
        command = [sys.executable, "-m", "tpi.cli", "plan", "--json", "--workers", self.addresses, "-m", model]
        fields: dict[str, Any] = json.loads(self.run([*command, *map(str, flags)]).splitlines()[-1])
        return fields

    def run(self, command: Sequence[str]) -> str:
        """Run `command` on the first device and return its output.

        Raises:
            RuntimeError: if the command fails; the message holds its output and the last output of the workers.
        """
        first = self.bed.topology.devices[0].name
        environment = {**os.environ, WORKERS: self.addresses}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with self.bed.popen(first, list(command), env=environment, **pipes) as process:
            output, said = process.communicate()
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {said[-2000:]}\n{self._last_words()}")
        return str(output)

    def _last_words(self) -> str:
        return "\n".join(
            f"{log.name}: {log.read_text(errors='replace')[-500:]}" for log in sorted(self._logs.iterdir())
        )


@contextmanager
def home(topology: Topology, shaped: bool = True) -> Iterator[Home]:
    """Start an emulated home with workers.

    Shards stay in the cache for the next home with the same number of devices.

    Args:
        shaped: measure the links before anything runs, and fail if they differ from `topology`.
    """
    size = len(topology.devices)
    with tempfile.TemporaryDirectory() as logs, Testbed.start(topology) as bed:
        if shaped:
            verify_patiently(bed)
        disks = "-slow-disks" if any(device.disk for device in topology.devices) else ""  # a cache remembers its disk
        options = HostWorkerOptions(cache=default_cache() / "benchmarks" / f"home-{size}{disks}", logs=Path(logs))
        with workers(bed, options) as addresses:
            yield Home(bed, addresses, Path(logs))


def verify_patiently(bed: Testbed) -> None:
    """Measure the links until all are as specified, since a busy machine may fail to emulate a network for minutes.

    Raises:
        TestbedError: if a link still differs after two minutes.
    """
    until = monotonic() + _QUIET_S
    while monotonic() < until:
        with suppress(TestbedError):
            verify(bed)
            return
    verify(bed)


def paper_homes(end_to_end: float, bandwidth: float) -> Topology:
    """Return the paper's eight devices behind eight gateways.

    `end_to_end` is the one-way latency from device to device in seconds, `bandwidth` is in bits per second.
    """
    paper = load_topology("paper-8-devices")
    first, last = paper.devices[0].name, paper.devices[-1].name
    factor = end_to_end / paper.latency(first, last)
    links = tuple(replace(link, latency=link.latency * factor, bandwidth=bandwidth) for link in paper.links)
    return replace(paper, links=links)


def wheel(size: int, end_to_end: float, bandwidth: float, cpu: float | None = None) -> Topology:
    """Return `size` devices of `cpu` cores around one router.

    `end_to_end` is the one-way latency from device to device in seconds, `bandwidth` is in bits per second.
    """
    devices = tuple(Host(f"device{number}", cpu=cpu) for number in range(1, size + 1))
    return star(f"wheel-{size}", devices, HostLink(("", ""), bandwidth, end_to_end / 2))


def specified_links(topology: Topology) -> LinkTable:
    """Return the links between devices that the topology specifies: the sum of latencies, the least bandwidth."""
    names = [device.name for device in topology.devices]
    pairs = {(a, b): (names[a], names[b]) for a in range(len(names)) for b in range(a + 1, len(names))}
    links = {ranks: EndToEnd(topology.latency(*ends), topology.bandwidth(*ends) / 8) for ranks, ends in pairs.items()}
    return LinkTable(len(names), links)
