"""Machines with keys of their own, on this one: folders of keys, and policies that ask for keys on loopback, too."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import permutations
from pathlib import Path

from tpi.keys.identity import load_identity
from tpi.keys.policy import KeyPolicy
from tpi.keys.ring import KeyRing, PairedKey
from tpi.net.channel import Channel
from tpi.net.sockets import CONTROL, Net, Plane


def locked(folder: Path) -> KeyPolicy:
    """A policy of the machine whose keys are in `folder`, to which every address is another machine's."""
    return KeyPolicy(folder, outside=lambda host: True)


def pair_folders(*folders: Path) -> None:
    """Have all of these machines trust each other; each is called like its folder."""
    for one, other in permutations(folders, 2):
        KeyRing(one).pair(PairedKey(other.name, load_identity(other).public))


def trust(one: Path, other: Path) -> None:
    """Have `one` trust `other`, but not the other way."""
    KeyRing(one).pair(PairedKey(other.name, load_identity(other).public))


@contextmanager
def listening(policy: KeyPolicy, plane: Plane = CONTROL) -> Iterator[tuple[Net, Channel, int]]:
    """A ROUTER behind `policy`, and its port."""
    with closing(Net(policy=policy)) as net:
        router, port = net.bind(plane, "127.0.0.1", 0)
        yield net, Channel(router, admits=policy.admits), port
