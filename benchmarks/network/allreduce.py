"""Collectives against a raw TCP star, on this machine or over a testbed's links.

    python -m benchmarks.network.allreduce [--nodes 2,4] [--testbed FILE] [--json FILE]

There is one process per node, which takes part in all contenders in turn, so that other load on the machine affects all
of them alike. Figures are measured by the master: the mean of four exchanges in a row, and the median of these means.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.network.group_node import BASELINE, Plan
from master.reporting.report import print_choice
from testbed.launch import Testbed
from tpi.topology.schema import load_topology

COMMAND = [sys.executable, "-m", "benchmarks.network.group_node"]
Start = Callable[[int], "subprocess.Popen[str]"]
"""Starts the process of a rank, its standard streams being pipes."""


def _say(process: "subprocess.Popen[str]", words: object) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(words) + "\n")
    process.stdin.flush()


def _hear(process: "subprocess.Popen[str]") -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process ended early, with exit code {process.wait()}")
    return json.loads(line)


def measure(plan: Plan, hosts: list[str], start: Start) -> dict[str, Any]:
    """Run the nodes and return the master's report.

    It has `medians` in seconds by contender and payload, and the automatic `choice`, if there was one.
    """
    with ExitStack() as stack:
        processes = [stack.enter_context(start(rank)) for rank in range(len(hosts))]
        for process in processes:
            stack.callback(process.kill)
        for rank, process in enumerate(processes):
            _say(process, {"rank": rank, "hosts": hosts, "plan": plan.to_dict()})
        ports = [_hear(process) for process in processes]
        for process in processes:
            _say(process, ports)
        report: dict[str, Any] = _hear(processes[0])
        return report


@contextmanager
def _places(options: argparse.Namespace) -> Iterator[list[tuple[list[str], Start]]]:
    """Yield the groups of nodes to measure: their addresses, and a function that starts the process of a rank."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    if options.testbed is None:
        sizes = [int(size) for size in options.nodes.split(",")]
        yield [(["127.0.0.1"] * size, lambda rank: subprocess.Popen(COMMAND, **pipes)) for size in sizes]
        return
    with Testbed.start(load_topology(options.testbed)) as bed:
        names = [device.name for device in bed.topology.devices]
        yield [([bed.address(name) for name in names], lambda rank: bed.popen(names[rank], COMMAND, **pipes))]


def _print(size: int, report: dict[str, Any], payloads: tuple[int, ...]) -> None:
    medians = report["medians"]
    print(f"\n{size} nodes, microseconds (times the TCP star)")
    print("payload".ljust(10) + "".join(f"{payload / 1000:>14.1f} kB" for payload in payloads))
    for name, row in medians.items():
        cells = (f"{s * 1e6:10.0f} ({s / base:4.2f})" for s, base in zip(row, medians[BASELINE], strict=True))
        print(name.ljust(10) + "".join(cells))
    if "choice" in report:
        print_choice(report["choice"])


def main() -> None:
    """Parse the command line, measure, print tables, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="2,4", help="numbers of nodes, the master included")
    parser.add_argument("--testbed", help="a topology: its devices are the nodes")
    parser.add_argument("--payloads", default="2304,16384,32768,1048576", help="bytes of f32")
    parser.add_argument("--collectives", default="star,mesh,two-shot,tree,ring,auto")
    parser.add_argument("--wire", default="f32")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--repeat", type=int, default=5, help="rows of four exchanges per round")
    parser.add_argument("--spin-us", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    payloads = tuple(int(payload) for payload in options.payloads.split(","))
    names = (BASELINE, *options.collectives.split(","))
    plan = Plan(names, options.wire, payloads, options.rounds, options.repeat, options.spin_us)
    reports = []
    with _places(options) as places:
        for hosts, start in places:
            report = measure(plan, hosts, start)
            _print(len(hosts), report, payloads)
            reports.append({"nodes": len(hosts), "testbed": options.testbed, **plan.to_dict(), **report})
    if options.json:
        options.json.write_text(json.dumps(reports, indent=1))


if __name__ == "__main__":
    main()
