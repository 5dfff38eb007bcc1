"""Functions with which a session plans over other machines.

The planner takes half a second to import, so it is loaded only if needed.
"""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from master.deployment.stages import AUTO, ONE
from master.joining.measured import MeasuredWorkers
from master.joining.shares import Shares, SharesLater, Sharing
from master.options import RunOptions
from tpi.keys.policy import KeyPolicy, leaves_machine
from tpi.net.sockets import split_address

if TYPE_CHECKING:
    from master.joining.split import FirstSplit, PlannedSplit
    from master.planning.home.asked import Neighbour


def neighbours_at(addresses: Sequence[str], wanted: Callable[[], bool], policy: KeyPolicy) -> "list[Neighbour]":
    """Return the workers at `addresses` with their measurements.

    Import the planner first, so that no later request waits for the import.
    """
    for name in ("master.joining.split", "scipy.optimize"):
        import_module(name)
    from master.planning.home.asked import neighbours_at

    return neighbours_at(addresses, wanted, policy)


def first_split(options: RunOptions, measured: MeasuredWorkers) -> "FirstSplit | None":
    """Return a split by measured speeds if all workers are on other machines and the user chose no split, else None."""
    hosts = [split_address(address)[0] for address in options.workers]
    if _divided_by_user(options) or not hosts or not all(map(leaves_machine, hosts)):
        return None
    from master.joining.split import plan_split

    return plan_split(options, measured)


def shares_later(asked: Shares, options: RunOptions, measured: MeasuredWorkers) -> Sharing:
    """Return the shares that the user asked for.

    If no worker was found yet, return shares that are planned when a worker joins.
    """
    alone = options.discover and options.keys and not _divided_by_user(options) and not options.workers
    return SharesLater(partial(_split_later, options, measured)) if alone else asked


def _divided_by_user(options: RunOptions) -> bool:
    return options.split is not None or options.stages not in (AUTO, ONE)


def _split_later(options: RunOptions, measured: MeasuredWorkers) -> "PlannedSplit":
    from master.joining.split import split_later

    return split_later(options, measured)
