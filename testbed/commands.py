"""Subcommands of `tpi testbed`."""

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tpi.paths import DIRECTORY
from tpi.topology.units import format_rate, parse_rate, parse_time


def _with_unit(parse: Callable[[str], float]) -> Callable[[click.Context, click.Parameter, str | None], float | None]:
    """Return a click callback that parses a flag with a unit, such as `10 Mbit`."""

    def convert(context: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
        try:
            return None if text is None else parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error), context, parameter) from error

    return convert


_BACKEND = click.option("--backend", default="auto", show_default=True, type=click.Choice(["auto", "tc", "tun"]))
_VERIFY = click.option("--verify/--no-verify", default=True, show_default=True, help="Measure the links after set-up.")
_ID = click.option("--id", "name", metavar="ID", help="The testbed's ID; needed if several run.")


@click.group()
def testbed() -> None:
    """Emulate a home network on this machine: devices, links, limits and faults. Needs Linux and root."""


testbed.__test__ = False  # type: ignore[attr-defined]  # keeps pytest from collecting it as a test


@testbed.command("topologies")
def topologies() -> None:
    """List the topologies that come with TPI."""
    from tpi.topology.schema import load_topology, shipped

    for name in shipped():
        click.echo(f"{name:18} {load_topology(name).about}")


@testbed.command("up")
@click.argument("file")
@_BACKEND
@_VERIFY
def up(file: str, backend: str, verify: bool) -> None:
    """Set up the topology FILE (a path, or a name from `topologies`), which stays until `down`."""
    from testbed.launch import Testbed
    from tpi.topology.schema import load_topology

    topology = load_topology(file)
    with contextlib.ExitStack() as undo:
        bed = undo.enter_context(Testbed.start(topology, backend, owner="up"))
        if verify:
            _verify(bed)
        undo.pop_all()
    click.echo(f"testbed {bed.record.id}: {topology.name}, links by {bed.record.backend}")
    for host in bed.record.devices:
        click.echo(f"  {host.name:16} {host.address}")


@testbed.command("run")
@click.argument("file")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@_BACKEND
@_VERIFY
@click.option("--cache", type=DIRECTORY, help="Directory in which the workers' shards are kept for the next run.")
@click.option("--logs", type=DIRECTORY, help="Directory in which the workers' logs are kept.")
@click.option("--worker", metavar="COMMAND", help="Command to start in place of `tpi worker`, with the same flags.")
def run(
    file: str,
    command: tuple[str, ...],
    backend: str,
    verify: bool,
    cache: Path | None,
    logs: Path | None,
    worker: str | None,
) -> None:
    """Set up FILE, start workers on all devices but the first, and run COMMAND (after `--`) on the first."""
    import shlex

    from testbed import cluster
    from testbed.launch import Testbed
    from tpi.topology.schema import load_topology

    topology = load_topology(file)
    options = cluster.HostWorkerOptions(cache=cache and cache.resolve(), logs=logs)
    if worker:
        options = cluster.HostWorkerOptions(tuple(shlex.split(worker)), options.cache, options.logs)
    with cluster.stop_on_signals() as stop, Testbed.start(topology, backend) as bed:
        if verify:
            _verify(bed)
        with cluster.workers(bed, options) as addresses:
            code = cluster.run(bed, list(command), addresses, stop)
            _print_traffic(bed.ask("report"))
    sys.exit(code)


@testbed.command("exec")
@click.argument("device")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@_ID
def execute(device: str, command: tuple[str, ...], name: str | None) -> None:
    """Run COMMAND (after `--`) on DEVICE of a running testbed."""
    from testbed.enter import enter
    from tpi.errors import TestbedError

    try:
        enter(_find(name), device, 0, list(command))
    except OSError as error:
        raise TestbedError(f"cannot start {command[0]!r} on device {device}: {error.strerror or error}") from error


@testbed.command("fault")
@click.argument("action", type=click.Choice(["cut", "heal", "slow", "kill", "freeze", "thaw"]))
@click.argument("device")
@click.option(
    "--bandwidth",
    metavar="RATE",
    callback=_with_unit(parse_rate),
    help="For slow: bandwidth limit of the device's links, e.g. '10 Mbit'.",
)
@click.option(
    "--latency",
    metavar="TIME",
    callback=_with_unit(parse_time),
    help="For slow: additional latency each way, e.g. '50 ms'.",
)
@_ID
def fault(action: str, device: str, bandwidth: float | None, latency: float | None, name: str | None) -> None:
    """Apply a fault to DEVICE of a running testbed, or undo one.

    cut: nothing gets through. heal: undo cut and slow. slow: less bandwidth, more latency. kill: send SIGKILL to all
    its programs. freeze: stop its programs, while their connections stay open. thaw: continue the frozen programs.
    """
    from testbed.faults import apply_fault

    click.echo(apply_fault(_find(name), action, device, bandwidth, latency))


@testbed.command("status")
@_ID
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def status(name: str | None, as_json: bool) -> None:
    """Print the traffic and the CPU use of the link process of a running testbed."""
    from testbed.control import ask

    report = ask(_find(name), "report")
    if as_json:
        click.echo(json.dumps(report))
    else:
        _print_traffic(report)


@testbed.command("down")
@click.argument("name", metavar="[ID]", required=False)
@click.option("--all", "everything", is_flag=True, help="Also take down testbeds of a running `tpi testbed run`.")
def down(name: str | None, everything: bool) -> None:
    """Take down the testbed ID, or all testbeds that `up` made, and remove the remains of killed testbeds."""
    from testbed import launch, state
    from testbed.network.namespaces import require_root

    require_root()
    if name is not None:
        launch.take_down(_find_any(name))
        click.echo(f"down: {name}")
        return
    for left in launch.remove_dead_testbeds():
        click.echo(f"removed the remains of {left}")
    for folder in state.folders(state.default_root()):
        if everything or state.read(folder).owner == "up":
            launch.take_down(folder)
            click.echo(f"down: {folder.name}")


@testbed.command("doctor")
def doctor() -> None:
    """Report which features of this machine a testbed can use, and how to provide missing ones.

    Without root it reports less. The exit code is 1 if no testbed can be created.
    """
    from testbed.checks.doctor import examine

    able = True
    for finding in examine():
        mark = {True: "ok", False: "NO", None: "--"}[finding.good]
        click.echo(f"{mark}  {finding.what:28} {finding.meaning}")
        able = able and not (finding.needed and finding.good is False)
    if not able:
        raise click.exceptions.Exit(1)


def _find(name: str | None) -> Path:
    from testbed import state
    from testbed.network.namespaces import require_root

    require_root()
    return state.find(state.default_root(), name)


def _find_any(name: str) -> Path:
    """Return the directory of the testbed `name`, whether it runs or not."""
    from testbed import state
    from tpi.errors import TestbedError

    for folder in state.folders(state.default_root()):
        if folder.name == name:
            return folder
    raise TestbedError(f"there is no testbed {name}: `tpi testbed down` without a name takes down all testbeds")


def _verify(bed: Any) -> None:
    from testbed.checks.verify import verify

    measured = verify(bed)
    bed.ask("reset")
    trips = [one.measured - one.expected for one in measured if one.quantity == "round trip"]
    rates = [one.measured / one.expected - 1 for one in measured if one.quantity == "bandwidth"]
    parts = [f"{len(trips)} round trips within {max(map(abs, trips)) * 1e3:.2f} ms"] if trips else []
    parts += [f"{len(rates)} bandwidths within {max(map(abs, rates)):.1%}"] if rates else []
    click.echo(f"verified: {', '.join(parts) or 'nothing to verify'}", err=True)


def _print_traffic(report: dict[str, Any]) -> None:
    if "packets" not in report:
        return
    click.echo(
        f"link process: {report['cpu']:.1%} of a core over {report['seconds']:.1f} s, {report['packets']} packets, "
        f"{report['bytes'] / 1e6:.1f} MB ({format_rate(8 * report['bytes'] / report['seconds'])}/s), "
        f"{report['dropped']} dropped, late by {report['late_ms_mean']:.3f} ms, {report['late_ms_worst']:.1f} at worst",
        err=True,
    )
