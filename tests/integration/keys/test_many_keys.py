"""A machine that trusts many others tries their keys, a few connections at a time, until one key is the right one."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import zmq
from zmq.utils import z85

from master.workers.dial import Dial, Line
from tests.support.cluster.key_helpers import listening, locked, pair_folders
from tests.support.house import until
from tpi.keys.identity import load_identity
from tpi.keys.ring import KeyRing, PairedKey
from tpi.net.sockets import Net

MANY = 70  # more than twice as many as there are lines at once


def trust_many(folder: Path) -> None:
    """Make a machine trust many others, which were paired later."""
    for number in range(MANY):
        KeyRing(folder).pair(PairedKey(f"other {number}", z85.decode(zmq.curve_keypair()[0])))


@contextmanager
def dialling(folder: Path, port: int) -> Iterator[Dial]:
    with closing(Net(policy=locked(folder))) as net, closing(Dial(net, f"127.0.0.1:{port}", b"me")) as dial:
        yield dial


def test_the_right_one_of_many_keys_is_found(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    pair_folders(here, there)
    trust_many(there)
    with listening(locked(here)) as (_, _, port), dialling(there, port) as dial:
        found: list[Line] = []

        def answered() -> bool:
            found.extend(line for line in [dial.answered()] if line)
            return bool(found)

        until(answered)
        assert found[0].key == load_identity(here).public
        found[0].close()


def test_a_worker_without_a_known_key_is_named_in_the_end(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    trust_many(there)
    tried = set[bytes]()
    with listening(locked(here)) as (_, _, port), dialling(there, port) as dial:
        while not dial.obstacle():
            tried.update(line.key for line in dial.lines)
            assert dial.answered() is None
        assert "has none of the keys" in dial.obstacle()
        assert len(tried) == MANY + 1  # its own, too
