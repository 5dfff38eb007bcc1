"""Faults between a master and its workers, each with its figure; the tests are named after rows of docs/faults.md."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from master.workers import remote
from master.workers.cluster import Cluster
from tests.support.cluster.cluster_helpers import HIDDEN, MadeUpModel, fake_worker, fake_workers, step
from tests.support.cluster.key_helpers import locked, trust
from tests.support.figures import assert_figures
from tests.support.house import until_error
from tests.support.processes.fake_worker import EXHAUST
from tests.support.small_disk import small_disk
from tpi import __version__
from tpi.errors import NodeError, NodeLost, NodeRefused
from tpi.keys.identity import load_identity
from tpi.keys.text import short_key
from tpi.net import codec
from tpi.net.fields import IN_FLIGHT_BYTES, TRANSFER_BYTES
from tpi.net.sockets import Net
from tpi.net.transfers import Need

REFUSED_S, NAMED_S = 1.0, 3.0
MASTER = rf".*process {os.getpid()}"
VECTORS = 2 * 4 * HIDDEN  # bytes beside the units of a model of one layer


@pytest.fixture
def addresses(tmp_path: Path) -> Iterator[list[str]]:
    """Two workers."""
    with fake_workers([tmp_path / "a", tmp_path / "b"]) as (_, addresses):
        yield addresses


def refused(row: str, sentence: str, connect: Callable[[], object]) -> None:
    """Check that a connection is refused within a second, with a `sentence` that names both sides."""

    def once(number: int) -> dict[str, float]:
        begun = time.monotonic()
        with pytest.raises(NodeRefused, match=sentence):
            connect()
        return {"refused": time.monotonic() - begun}

    assert_figures(row, {"refused": REFUSED_S}, once)


def test_same_worker_twice(addresses: list[str]) -> None:
    given = [addresses[0], addresses[0].replace("127.0.0.1", "localhost")]
    sentence = rf"worker ({'|'.join(given)}) is given twice to {MASTER}.*give each worker once"
    refused("same worker twice", sentence, lambda: Cluster.connect(given))


def test_wrong_version(addresses: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The protocol number decides, because two checkouts of one version may have different messages."""
    own = codec.protocol()
    monkeypatch.setattr(remote, "__version__", "99.1")
    with Cluster.connect(addresses[:1]) as cluster:
        assert cluster.hellos[0].version == __version__
    other = own ^ 1
    monkeypatch.setattr(codec, "protocol", lambda: other)
    monkeypatch.setattr(remote, "protocol", lambda: other)
    sentence = (
        rf"worker {addresses[0]} runs tpi {re.escape(__version__)} \(protocol {own:x}\), {MASTER}\) "
        rf"runs tpi 99\.1 \(protocol {other:x}\); install the same version on both"
    )
    refused("wrong version", sentence, lambda: Cluster.connect(addresses[:1]))


def test_wrong_key(tmp_path: Path) -> None:
    """Both cases: the master does not trust the worker's key, or the worker does not trust the master's."""
    worker, master, other = tmp_path / "worker", tmp_path / "master", tmp_path / "other"
    mine = short_key(load_identity(master).public)
    with fake_worker(tmp_path / "a", "--keys", str(worker)) as (_, address):

        def connect() -> None:
            Cluster.connect([address], Net(policy=locked(master)), timeout_s=60)

        trust(master, other)
        sentence = rf"answers at {address} has none of the keys that this machine \({mine}\) trusts"
        refused("wrong key of a worker", sentence, connect)
        trust(master, worker)
        sentence = rf"worker at {address} does not accept this machine's key \({mine}\)"
        refused("wrong key of a master", sentence, connect)
        trust(worker, master)
        with Cluster.connect([address], Net(policy=locked(master))) as cluster:
            assert cluster.workers[0].key == load_identity(worker).public


def test_out_of_memory(addresses: list[str]) -> None:
    """The master raises an error with the worker's name, and the workers go on serving."""
    model = MadeUpModel()

    def once(number: int) -> dict[str, float]:
        with Cluster.connect(addresses) as cluster:
            assert len(cluster.hellos) == len(addresses)
            cluster.assign(model.split(cluster.session, 1, cluster.peers())[1:], model)
            begun = time.monotonic()
            cluster.step(step(cluster.session, 1, 0, EXHAUST))
            error = until_error(cluster.poll, NodeError)
            took = time.monotonic() - begun
        assert re.search(r"worker [ab] .*out of memory; give it a smaller share with --split", str(error))
        return {"named": took}

    assert_figures("out of memory", {"named": NAMED_S}, once)
    assert once(0)


def test_disk_full(tmp_path: Path) -> None:
    """The master raises an error with the worker's name. No half-written file stays, and the worker serves on."""
    large, little = MadeUpModel(width=64, units=64), MadeUpModel()
    with small_disk(tmp_path / "small", 1 << 20) as small, fake_worker(small) as (_, address):

        def once(number: int) -> dict[str, float]:
            with Cluster.connect([address]) as cluster:
                begun = time.monotonic()
                with pytest.raises(NodeError, match=rf"worker small \({address}\): disk full: {small}.*--cache"):
                    cluster.assign(large.split(cluster.session, 1, cluster.peers(), 64)[1:], large)
                took = time.monotonic() - begun
            assert not [*small.rglob("*.part"), *small.rglob("*.shard")]
            return {"named": took}

        assert_figures("disk full", {"named": NAMED_S}, once)
        with Cluster.connect([address]) as cluster:
            (ready,) = cluster.assign(little.split(cluster.session, 1, cluster.peers(), 8)[1:], little)
        assert ready.fetched_bytes > 0


def test_transfer_cut(tmp_path: Path) -> None:
    """The transfer continues where it was cut. At most 4 MiB that were in transit are sent again."""
    model = MadeUpModel(layers=1, width=64, units=512)  # 24 MiB of neurons for the worker

    class Killer:
        def __init__(self, process: int) -> None:
            self.process, self.sent = process, 0

        def read(self, need: Need) -> memoryview:
            data = model.read(need)
            self.sent += len(data)
            if self.sent > 10 * TRANSFER_BYTES:
                os.kill(self.process, signal.SIGKILL)
            return data

    with fake_worker(tmp_path / "a") as (process, address), Cluster.connect([address]) as cluster:
        killer = Killer(process.pid)
        with pytest.raises(NodeLost):
            cluster.assign(model.split(cluster.session, 1, cluster.peers(), 512)[1:], killer)
    with fake_worker(tmp_path / "a") as (_, address), Cluster.connect([address]) as cluster:
        (ready,) = cluster.assign(model.split(cluster.session, 1, cluster.peers(), 512)[1:], model)
    assert 0 < ready.fetched_bytes < ready.weight_bytes - 5 * TRANSFER_BYTES
    assert killer.sent + ready.fetched_bytes <= ready.weight_bytes + VECTORS + IN_FLIGHT_BYTES


def test_bit_flip_on_the_wire(tmp_path: Path) -> None:
    """Before it is ready, the worker requests the damaged unit again, and no other unit."""
    model = MadeUpModel(layers=1, width=64, units=64)
    flipped = list[Need]()

    class Flips:
        def read(self, need: Need) -> memoryview:
            data = bytearray(model.read(need))
            if need.run == "neuron" and not flipped:
                flipped.append(need)
                data[0] ^= 1
            return memoryview(data)

    with fake_worker(tmp_path / "a") as (_, address), Cluster.connect([address]) as cluster:
        (ready,) = cluster.assign(model.split(cluster.session, 1, cluster.peers(), 64)[1:], Flips())
    assert flipped
    assert ready.fetched_bytes == ready.weight_bytes + VECTORS + model.layouts[2].unit_bytes
    stored = b"".join(path.read_bytes() for path in (tmp_path / "a").rglob("*.shard"))
    assert all(units.tobytes() in stored for (_, run), units in model.units.items() if run == "neuron")
