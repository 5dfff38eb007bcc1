"""The flags of `tpi plan` that name a home, and the home that they name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from master.options import links_file, worker_addresses
from master.planning.home.members import DEFAULT_LINK, Home, described_home, home_in_file, home_of_cards
from master.planning.node import NodeFlags, planned_node
from tpi.errors import UsageError
from tpi.keys.policy import KeyPolicy
from tpi.system.quota import allowed_cores

Command = TypeVar("Command", bound=Callable[..., Any])

_HOMES = ("devices", "topology", "workers")
_ALONE = ("machine", "device", "gpu_memory")
_LIMITS = ("weights", "kv", "pipeline")
_OPTIONS = (
    click.option(
        "--devices", metavar="SIZES", help="Plan for machines with this much memory, e.g. 8x8GiB or 16GiB,3x8GiB."
    ),
    click.option("--link", metavar="WORDS", help=f"Link between the machines of --devices (default: {DEFAULT_LINK})."),
    click.option(
        "--topology",
        metavar="FILE",
        help="Plan for the home in a topology file: a path, or the name of one that comes with tpi.",
    ),
    click.option(
        "--workers",
        multiple=True,
        metavar="HOST:PORT",
        help="Plan for this machine and these workers, not those of TPI_WORKERS.",
    ),
    click.option("--no-keys", is_flag=True, help="With --workers: ask workers that were started with --no-keys."),
)


def home_options(command: Command) -> Command:
    """Add the flags that name a home."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def nodes_of_cards(flags: dict[str, Any]) -> bool:
    """Return True if each of the cards that the flags name is a node of its own, as `tpi run` makes it for batches."""
    return flags["pipeline"] == "batch" and len(flags["device"]) > 1


def home_of(flags: dict[str, Any], node: NodeFlags, cache: Path, files: list[Path]) -> Home | None:
    """Return the home that the flags name, or None. `files` are on the disk from which this machine would read.

    With `--pipeline batch`, a machine with several cards is a home too, with one node for each card.
    With `--batch`, the flags of a single machine describe each of `--devices`, or this machine if `--workers` is given.

    Raises:
        UsageError: if two homes are named, if flags of a single machine are given too, or if a flag has no effect.
        NodeLost: if a worker does not answer.
    """
    named = [name for name in _HOMES if flags[name]]
    if flags["link"] is not None and named != ["devices"]:
        raise UsageError("--link describes the links between the machines of --devices; give it with --devices only")
    if flags["no_keys"] and named != ["workers"]:
        raise UsageError("--no-keys says how --workers are asked; give it with --workers only")
    if not named:
        if not nodes_of_cards(flags):
            return None
        if lost := next((name for name in ("weights", "kv") if flags[name] != "auto"), None):
            raise UsageError(f"a plan of --pipeline batch for several cards cannot count --{lost}; leave it out")
        whole = planned_node(node, cache, files)
        return home_of_cards(whole.machine, whole.origin)
    if len(named) > 1:
        raise UsageError(f"--{named[0]} and --{named[1]} exclude each other; give one of them")
    given = [name for name in _ALONE if flags[name]]
    if given and (flags["batch"] == 1 or named == ["topology"]):
        flag = given[0].replace("_", "-")
        beside = "" if named == ["topology"] else ", or --batch N, for which several may have accelerators"
        raise UsageError(
            f"--{flag} describes one machine, but --{named[0]} names several; leave out one of the two flags{beside}"
        )
    idle = list(_LIMITS)
    if flags["devices"]:
        idle += ["memory"] if given else ["memory", "remeasure"]
    _refuse_idle(named[0], idle, flags)
    if flags["devices"]:
        home = described_home(flags["devices"], flags["link"] or DEFAULT_LINK)
        return home.all_like(planned_node(node, cache, files).machine) if given else home
    own = planned_node(node, cache, files).machine
    if flags["topology"]:
        return home_in_file(flags["topology"], own, allowed_cores())
    from master.planning.home.asked import home_asked
    from master.workers.survey import WorkerLinks

    policy = KeyPolicy(locked=not flags["no_keys"])
    links = WorkerLinks(links_file(cache), policy)
    return home_asked(worker_addresses(flags["workers"]), own, policy, links, flags["remeasure"])


def _refuse_idle(home: str, names: list[str], flags: dict[str, Any]) -> None:
    """Refuse flags that would have no effect.

    Raises:
        UsageError: naming the first such flag.
    """
    if idle := [name for name in names if flags[name] not in (None, False, "auto")]:
        raise UsageError(f"--{idle[0]} has no effect if --{home} names the machines; leave it out")
