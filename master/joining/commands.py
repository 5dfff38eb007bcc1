"""The commands `tpi ps` and `tpi doctor`: a list of workers and the masters that use them, and a list of problems."""

import sys
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import click

from master.joining.checks import Observation, check_machine, check_workers
from master.joining.discovery import addresses_of
from master.options import links_file
from master.workers.asking import ask
from master.workers.survey import WorkerLinks
from tpi.config import default_cache
from tpi.keys.policy import KeyPolicy
from tpi.keys.text import short_key
from tpi.net.sockets import Net
from tpi.paths import DIRECTORY

_WORKERS = click.option(
    "--workers",
    multiple=True,
    metavar="HOST:PORT,...",
    help="Workers to ask (default: TPI_WORKERS, else the paired workers).",
)
_NO_KEYS = click.option("--no-keys", is_flag=True, help="Ask workers that were started with --no-keys.")
_PORT = 9990
_AGES = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


@click.command()
@_WORKERS
@_NO_KEYS
def ps(workers: tuple[str, ...], no_keys: bool) -> None:
    """Show the workers, the master that uses each, and for how long."""
    with closing(Net(policy=KeyPolicy(locked=not no_keys))) as net:
        asked = ask(net, addresses_of(workers, net.policy))
        for one in asked:
            if (said := one.condition) is None:
                click.echo(f"{one.address}  {one.problem}")
                continue
            use = f"used by {said.used_by} for {_age(said.used_s)}" if said.used_by else "free"
            memory = (said.profile.memory_limit or said.profile.memory_free) / (1 << 30)
            key = f"  {short_key(one.key)}" if one.key else ""
            click.echo(f"{one.name}  {one.address}  {use}  {said.profile.cores} cores, {memory:.1f} GiB{key}")
    if not asked:
        click.echo("no workers; name some with --workers, or pair with machines that run one: tpi pair", err=True)


@click.command()
@_WORKERS
@click.option("--cache", type=DIRECTORY, help="Cache directory to check (default: ~/.cache/tpi).")
@_NO_KEYS
def doctor(workers: tuple[str, ...], cache: Path | None, no_keys: bool) -> None:
    """Check keys, ports in both directions, versions, clocks, memory and disk; exit with 1 if there is a problem."""
    cache = cache or default_cache()
    with closing(Net(policy=KeyPolicy(locked=not no_keys))) as net:
        click.echo("this machine")
        troubled = _print(check_machine(net.policy, cache, _PORT))
        links = WorkerLinks(links_file(cache))
        for address, findings in check_workers(net, addresses_of(workers, net.policy), links):
            click.echo(address)
            troubled |= _print(findings)
    sys.exit(int(troubled))


def _print(findings: Iterable[Observation]) -> bool:
    """Print the results of checks; return True if any of them has advice."""
    troubled = False
    for one in findings:
        troubled |= bool(one.advice)
        click.echo(
            f"  {'!' if one.advice else ' '} {one.subject:<8} {one.found}{': ' if one.advice else ''}{one.advice}"
        )
    return troubled


def _age(seconds: float) -> str:
    size, unit = next(((size, unit) for size, unit in _AGES if seconds >= size), (1, "s"))
    return f"{seconds / size:.0f} {unit}"
