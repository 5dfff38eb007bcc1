"""The home of this machine and some workers: it asks the workers for their speeds and measures the links."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from master.planning.home.members import Home, links_of_home
from master.workers.asking import WorkerInquiry, ask
from master.workers.places import WorkerId
from master.workers.survey import WorkerLinks
from scheduler.model.machine import LAPTOP, DiskRate, NodeMachine, Rates
from scheduler.model.nodefigures import machine_from_message
from tpi.errors import NodeLost
from tpi.keys.policy import KeyPolicy
from tpi.net.fields import Profile
from tpi.net.sockets import Net
from tpi.progress import warn
from tpi.text import with_address
from tpi.topology.links import Link


@dataclass(frozen=True)
class Neighbour:
    """A worker with its measured speeds.

    Attributes:
        machine: its speeds, without its accelerator.
        link: the link to the worker.
        card: its speeds, with its accelerator.
        key: the key that it has proved to own; empty on this machine.
        disk_known: True if the speed of its disk was measured; False: a laptop's speed is assumed.
        end: its name in the cache of measured links (`allreduce.cache.end_of`).
    """

    address: str
    name: str
    machine: NodeMachine
    link: Link
    card: NodeMachine
    key: bytes = b""
    disk_known: bool = True
    end: str = ""

    @property
    def id(self) -> WorkerId:
        """The identity of the worker."""
        return WorkerId(self.address, self.key)


def neighbours_at(addresses: Sequence[str], wanted: Callable[[], bool], policy: KeyPolicy) -> list[Neighbour]:
    """Return the measured workers at `addresses`, in that order. Connections use the keys of `policy`.

    Stop early when `wanted` returns False. Implements `master.joining.measured.Ask`.

    Raises:
        NodeLost: if a worker does not answer, or does not report its speed.
        TpiError: if no worker can be asked.
    """
    with closing(Net(policy=policy)) as net:
        return [_neighbour(one) for one in ask(net, addresses, links=True, wanted=wanted)]


def home_of_neighbours(own: NodeMachine, neighbours: Sequence[Neighbour], links: WorkerLinks | None = None) -> Home:
    """Return the home of this machine, the master, and its neighbours; `cards` is empty without accelerators.

    `links` has the known links between workers, by indices into `neighbours`.
    """
    between = links.between([one.end for one in neighbours]) if links else {}
    cards = (own, *(one.card for one in neighbours))
    return Home(
        ("master", *(one.name for one in neighbours)),
        (replace(own, accelerator=None), *(one.machine for one in neighbours)),
        links_of_home([one.link for one in neighbours], between),
        _told(neighbours, between),
        cards if any(one and one.accelerator for one in cards) else (),
        tuple(one.address for one in neighbours if not one.disk_known),
        links.software([one.end for one in neighbours]) if links else {},
    )


def home_asked(
    addresses: Sequence[str],
    own: NodeMachine,
    policy: KeyPolicy | None = None,
    links: WorkerLinks | None = None,
    remeasure: bool = False,
) -> Home:
    """Return the home of this machine and the workers at `addresses`, except those that serve other masters now.

    Args:
        addresses: `HOST:PORT` of each worker.
        own: this machine.
        policy: has the keys for the connections (None: the user's).
        links: the table that measures unknown links between workers; None: do not measure them.
        remeasure: measure the known links between workers too.

    Raises:
        NodeLost: if a worker does not answer, or does not report its speed.
    """
    with closing(Net(policy=policy)) as net:
        asked = ask(net, addresses, links=True)
    others = [one for one in asked if one.condition is not None and one.unwilling]
    for one in others:
        warn(f"planned without {one.name}: {one.unwilling}")
    neighbours = [_neighbour(one) for one in asked if one not in others]
    if links:
        links.survey_at({one.address: one.end for one in neighbours}, remeasure)
    return home_of_neighbours(own, neighbours, links)


def _told(neighbours: Sequence[Neighbour], between: Mapping[tuple[int, int], Link]) -> str:
    """Return a phrase with the origin of the figures; if links between workers are known, it names the nearest two."""
    told = "this one, and workers as they measured themselves"
    if not between:
        return told
    (a, b), link = min(between.items(), key=lambda pair: pair[1].latency_s)
    return f"{told}; the nearest workers are {neighbours[a].name} and {neighbours[b].name}, {link.words()} apart"


def _neighbour(one: WorkerInquiry) -> Neighbour:
    if one.condition is None:
        raise NodeLost(one.address, one.problem)
    profile, who = one.condition.profile, with_address(one.name, one.address)
    if profile.speed is None:
        raise NodeLost(one.address, f"{who} does not say how fast it is; start it again with --remeasure")
    if one.link is None:
        raise NodeLost(one.address, f"{who} answered too slowly to measure the link to it; try again")
    card = machine_from_message(profile.memory_limit or profile.memory_free, profile.card, profile.speed)
    known = bool(profile.speed.disk)
    return Neighbour(one.address, one.name, _machine(profile), one.link, card, one.key, known, one.end)


def _machine(profile: Profile) -> NodeMachine:
    speed = profile.speed
    assert speed is not None
    disk = DiskRate(speed.disk) if speed.disk else LAPTOP.disk
    return NodeMachine(Rates(speed.read, speed.operations), profile.memory_limit or profile.memory_free, disk)
