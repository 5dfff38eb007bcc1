"""The command `tpi worker`."""

import logging
import socket
import sys
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tpi.cachelimit import CacheLimit, cache_limit_option
from tpi.config import default_cache, parse_size
from tpi.devices.options import DeviceOptions, device_options
from tpi.errors import TpiError, UsageError
from tpi.keys.policy import KeyPolicy
from tpi.net.sockets import split_address
from tpi.paths import DIRECTORY
from tpi.system.streams import filter_output
from tpi.text import plain

if TYPE_CHECKING:
    from tpi.kernels import Kernels
    from tpi.net.fields import MachineSpeed
    from worker.service.compute import Check
    from worker.service.options import WorkerOptions
    from worker.service.served import Build


@click.command()
@click.option(
    "--listen", default="127.0.0.1:9990", show_default=True, help="HOST:PORT to listen on; uses the next two ports too."
)
@click.option("--memory", metavar="SIZE", help="Memory to use above the bare process, e.g. 4GiB.")
@click.option("-t", "--threads", type=click.IntRange(min=1), help="Compute threads; all cores by default.")
@click.option("--name", help="Name of this worker, 1 to 256 characters; the host name by default.")
@click.option("--cache", type=DIRECTORY, help="Directory for this worker's shards.")
@cache_limit_option
@click.option(
    "--model-dir", type=DIRECTORY, help="Directory of packs on this machine; their weights are not sent again."
)
@click.option(
    "--announce/--no-announce", default=True, show_default=True, help="Let paired masters find this worker (mDNS)."
)
@click.option("--remeasure", is_flag=True, help="Measure this machine's speed again; masters divide the work by it.")
@click.option(
    "--no-keys",
    is_flag=True,
    help="Do not encrypt, and accept all connections: only for networks that a VPN protects. Turns off --announce too.",
)
@device_options
@click.option("--attached", is_flag=True, hidden=True, help="End when stdin closes.")
def worker(
    listen: str,
    memory: str | None,
    threads: int | None,
    name: str | None,
    cache: Path | None,
    cache_limit: CacheLimit,
    model_dir: Path | None,
    announce: bool,
    remeasure: bool,
    no_keys: bool,
    attached: bool,
    **devices: Any,
) -> None:
    """Lend this machine to a master. Without --listen, only masters on this machine can connect."""
    from worker.equipment import measured, open_equipment
    from worker.plan.checks import check_assign
    from worker.service.options import WorkerOptions

    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    host, port = split_address(listen, lowest_port=0)
    chosen = DeviceOptions.from_flags(devices)
    options = WorkerOptions(
        host=host,
        port=port,
        name=name if name is not None else plain(socket.gethostname(), 64),
        cache=(cache or default_cache()) / "shards",
        memory=_memory(memory),
        threads=threads or 0,
        cache_limit=cache_limit,
        attached=attached,
        key_policy=KeyPolicy(locked=not no_keys),
        model_dir=model_dir,
        announce=announce,
    )
    with closing(open_equipment(chosen, partial(measured, cache=cache or default_cache()))) as equipment:
        speed = None if attached else _speed(equipment.host.kernels, options, cache or default_cache(), remeasure)
        options = replace(options, card=equipment.card, speed=speed)
        serve(options, equipment.build, partial(check_assign, card=equipment.card))


def _memory(text: str | None) -> int:
    size = 0 if text is None else parse_size(text, "--memory")
    if text is not None and not size:
        raise UsageError("--memory must not be 0; give for example 600MiB or 4GiB")
    return size


def _speed(kernels: "Kernels", options: "WorkerOptions", cache: Path, remeasure: bool) -> "MachineSpeed":
    """Return the speed of this machine for masters to plan with.

    Measure the speed if it is not known or `remeasure` is set.
    """
    from worker.measure.speed import machine_speed

    return machine_speed(kernels, options.threads, cache, remeasure)


def serve(options: "WorkerOptions", build: "Build", check: "Check") -> None:
    """Listen, print the address on stdout, and serve until a signal arrives or stdin closes."""
    from worker.service.daemon import Daemon

    daemon = Daemon(options, build, check)
    ports = daemon.ports
    click.echo(announcement(options.name, options.host, ports.control, ports.collective, ports.weights))
    sys.stdout.flush()
    daemon.run()


def announcement(name: str, host: str, control: int, collective: int, weights: int) -> str:
    """Return the line that a worker prints when it listens; `master.workers.local` reads the address from it."""
    return f"worker {name} listens on {host}:{control} (collective {collective}, weights {weights})"


if __name__ == "__main__":
    filter_output()
    try:
        worker(prog_name="tpi worker")
    except TpiError as error:
        click.echo(f"tpi: {error}", err=True)
        sys.exit(error.exit_code)
