"""Simulated machines with keys of their own: folders of keys, and policies that require keys on loopback, too."""

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
    """Return the policy of a machine with keys in `folder` that treats every address as another machine."""
    return KeyPolicy(folder, outside=lambda host: True)


def pair_folders(*folders: Path) -> None:
    """Make all machines with keys in these folders trust each other; each is called like its folder."""
    for one, other in permutations(folders, 2):
        KeyRing(one).pair(PairedKey(other.name, load_identity(other).public))


def trust(one: Path, other: Path) -> None:
    """Make `one` trust `other`, without the converse."""
    KeyRing(one).pair(PairedKey(other.name, load_identity(other).public))


@contextmanager
def listening(policy: KeyPolicy, plane: Plane = CONTROL) -> Iterator[tuple[Net, Channel, int]]:
    """Yield a ROUTER socket that enforces `policy`, and its port."""
    with closing(Net(policy=policy)) as net:
        router, port = net.bind(plane, "127.0.0.1", 0)
        yield net, Channel(router, admits=policy.admits), port
