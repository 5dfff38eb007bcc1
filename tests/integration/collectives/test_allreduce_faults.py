"""Collectives when nodes are late, slow, dead or replaced, and when other programs send messages."""

import multiprocessing
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from struct import Struct
from threading import Event

import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from allreduce import connections
from allreduce._mailbox import Mailbox
from allreduce.base import F32, Endpoints, Group, GroupSpec, Peer, open_group
from allreduce.networked import Networked
from tests.support.cluster.collective_helpers import SESSION, House, partials_of
from tpi.errors import NodeLost
from tpi.net.sockets import COLLECTIVE, Net
from tpi.net.wire import EXACT, wire_format

LAYOUT, MAGIC, VERSION = Struct("<4sBBHQIIII"), b"TPIa", 2  # allreduce/native/header.hpp
NETWORKED = ["star", "mesh", "two-shot", "tree", "ring"]
SIZE = 4
PARTIALS = partials_of(SIZE, 200)


class DeathError(Exception):
    """Raised inside a node that a test lets die."""


class Dying:
    """A mailbox that raises `DeathError` before the operation that follows `operations` others."""

    def __init__(self, box: Mailbox, operations: int) -> None:
        self._box = box
        self._left = operations

    def __getattr__(self, name: str) -> object:
        if name in ("send", "send_all", "receive", "add", "sum"):
            if not self._left:
                raise DeathError
            self._left -= 1
        return getattr(self._box, name)


def sum_thrice(house: House, name: str, rank: int, dies_after: int | None) -> str:
    """Return how a node ended: done, dead, or the name of the node that it lost."""
    group = house.join(name, rank)
    try:
        if dies_after is not None:
            assert isinstance(group, Networked)
            group.box = Dying(group.box, dies_after)  # type: ignore[assignment]
        for step in (1, 2, 3):
            group.begin(step)
            group.allreduce(PARTIALS[rank])
        return "done"
    except DeathError:
        return "dead"
    except NodeLost as lost:
        return lost.node
    finally:
        group.close()


def ends_of(name: str, victim: int, operations: int) -> list[str]:
    """Return how each node of a group ended, by rank, if one node dies after a number of operations."""
    deaths = [operations if rank == victim else None for rank in range(SIZE)]
    with House(SIZE, timeout_s=3.0) as house, ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(sum_thrice, [house] * SIZE, [name] * SIZE, range(SIZE), deaths))


@pytest.mark.parametrize("name", NETWORKED)
@pytest.mark.parametrize("victim", [0, 2])
def test_a_node_that_dies_in_any_phase_is_noticed_by_all(name: str, victim: int) -> None:
    """One group for each phase; all groups wait for their deadlines at the same time."""
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(partial(ends_of, name, victim), range(4)))
    for ends in found:
        assert ends[victim] == "dead"
        assert all(end.startswith("node") for rank, end in enumerate(ends) if rank != victim), ends


@pytest.mark.parametrize("name", NETWORKED)
def test_nodes_that_come_late_are_waited_for(name: str) -> None:
    waiting = Event()

    def watch(rank: int) -> bool:
        waiting.set()
        return True

    def node(rank: int) -> F32:
        if rank == 2:
            assert waiting.wait(20)  # joins only once another has waited in vain for a while
        group = open_group(name, house.spec(rank), house.endpoints(rank, watch=watch))
        group.begin(1)
        total: F32 = group.allreduce(PARTIALS[rank]).copy()
        group.close()
        return total

    with House(SIZE) as house, ThreadPoolExecutor(SIZE) as pool:
        totals = list(pool.map(node, range(SIZE)))
    for total in totals:
        np.testing.assert_allclose(total, totals[0])


def test_progress_extends_the_deadline_and_its_absence_does_not() -> None:
    looked = 0
    enough = Event()

    def watch(rank: int) -> bool:
        nonlocal looked
        looked += 1
        if looked == 6:  # about 0.6 s, twice the deadline
            enough.set()
        return not enough.is_set() or looked < 40

    def worker(house: House) -> None:
        group = house.join("star", 1, timeout_s=20)
        group.begin(1)
        assert enough.wait(20)
        group.allreduce(PARTIALS[1])
        group.close()

    with House(2, timeout_s=0.3) as house, ThreadPoolExecutor(1) as pool:
        task = pool.submit(worker, house)
        group = open_group("star", house.spec(0), house.endpoints(0, watch=watch))
        group.begin(1)
        group.allreduce(PARTIALS[0])
        task.result()
        looked = 100
        with pytest.raises(NodeLost, match=r"node1 \(rank 1\) did not answer for 0.3 s") as lost:
            group.allreduce(PARTIALS[0])
        assert lost.value.node == "node1"
        group.close()


def test_a_watch_may_end_the_wait() -> None:
    def watch(rank: int) -> bool:
        raise KeyboardInterrupt

    with House(2) as house:
        group = open_group("star", house.spec(0), house.endpoints(0, watch=watch))
        with pytest.raises(KeyboardInterrupt):
            group.allreduce(PARTIALS[0])
        group.close()


def test_a_new_epoch_ignores_messages_of_the_lost_node() -> None:
    with House(3, timeout_s=0.3) as house, ThreadPoolExecutor(3) as pool:
        ends = list(pool.map(lambda rank: sum_thrice(house, "mesh", rank, 0 if rank == 0 else None), range(3)))
        assert ends[0] == "dead"
        ghost = house.join("mesh", 0)  # of the old epoch
        house.peers = house.peers[:2]

        def node(rank: int) -> tuple[F32, int]:
            group = house.join("mesh", rank, epoch=2, timeout_s=10)
            group.begin(1)
            total = group.allreduce(PARTIALS[rank]).copy()
            group.close()
            return total, group.stats.dropped

        assert isinstance(ghost, Networked)
        ghost.box.send((1,), 0, PARTIALS[0].reshape(-1) * 100, ghost.code)
        totals = list(pool.map(node, range(2)))
        ghost.close()
    np.testing.assert_array_equal(totals[0][0], PARTIALS[0] + PARTIALS[1])
    np.testing.assert_array_equal(totals[1][0], PARTIALS[0] + PARTIALS[1])


def frames_of_strangers() -> list[list[bytes]]:
    payload = PARTIALS[0].tobytes()

    def frame(*, session: int = SESSION, epoch: int = 1, rank: int = 0, version: int = VERSION) -> bytes:
        return LAYOUT.pack(MAGIC, version, 0, rank, session, epoch, 1, 0, 200) + payload

    return [
        [b""],
        [b"x" * 31],
        [b"\xff" * 900],
        [frame(session=1)],
        [frame(epoch=7)],
        [frame(rank=2)],
        [frame(rank=65535)],
        [frame(version=9)],
        [frame()],
        [frame(), b"more"],
        [b"", b"", frame()],
    ]


@pytest.mark.parametrize("identity", [b"stranger", b""])
def test_what_strangers_send_is_dropped_and_counted(identity: bytes) -> None:
    with House(2) as house, ThreadPoolExecutor(1) as pool:
        port = int(house.peers[1].address.rpartition(":")[2])
        stranger = house.net.connect(COLLECTIVE, "127.0.0.1", port, identity)
        stranger.sndtimeo = 5000
        for frames in frames_of_strangers():
            stranger.send_multipart(frames)
        assert house.routers[1] is not None
        assert house.routers[1].poll(5000)

        def worker() -> tuple[F32, int]:
            group = house.join("star", 1)
            group.begin(1)
            total = group.allreduce(PARTIALS[1]).copy()
            group.close()
            return total, group.stats.dropped

        task = pool.submit(worker)
        group = house.join("star", 0)
        group.begin(1)
        np.testing.assert_array_equal(group.allreduce(PARTIALS[0]), PARTIALS[0] + PARTIALS[1])
        total, dropped = task.result()
        np.testing.assert_array_equal(total, PARTIALS[0] + PARTIALS[1])
        assert dropped >= 1
        group.close()
        stranger.close(0)


def test_a_frame_put_together_as_documented_is_summed() -> None:
    """The frame has the bytes that native/header.hpp describes."""
    with House(2) as house:
        group = house.join("star", 0)
        group.begin(5)
        send(house, LAYOUT.pack(MAGIC, VERSION, 0, 1, SESSION, 1, 5, 0, 200) + PARTIALS[1].tobytes())
        np.testing.assert_array_equal(group.allreduce(PARTIALS[0]), PARTIALS[0] + PARTIALS[1])
        assert group.stats.dropped == 0
        group.close()


@pytest.mark.parametrize(
    ("wire", "payload", "values"),
    [
        ("bf16", np.array([0x3F80, 0xC020, 0x0001], "<u2").tobytes(), [1.0, -2.5, 2.0**-133]),
        ("q8", np.float16(0.25).tobytes() + bytes([4, 0xF6, *[0] * 30]), [1.0, -2.5, 0.0]),
    ],
)
def test_payloads_are_laid_out_as_documented(wire: str, payload: bytes, values: list[float]) -> None:
    with House(2, wire=wire) as house:
        group = house.join("star", 0)
        group.begin(5)
        send(house, LAYOUT.pack(MAGIC, VERSION, wire_format(wire).code, 1, SESSION, 1, 5, 0, 3) + payload)
        np.testing.assert_array_equal(group.allreduce(np.zeros((1, 3), np.float32)), [values])
        assert group.stats.dropped == 0
        group.close()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 31), st.integers(1, 255)), min_size=1, max_size=4), st.integers(0, 832))
def test_a_node_that_sends_mutated_headers_changes_nothing(flips: list[tuple[int, int]], length: int) -> None:
    with House(2) as house, ThreadPoolExecutor(1) as pool:

        def worker() -> None:
            group = house.join("mesh", 1)
            assert isinstance(group, Networked)
            group.begin(5)
            bad = bytearray(LAYOUT.pack(MAGIC, VERSION, 0, 1, SESSION, 1, 5, 0, 200) + bytes(800))
            for position, mask in flips:
                bad[position] ^= mask
            if bad[:32] != LAYOUT.pack(MAGIC, VERSION, 0, 1, SESSION, 1, 5, 0, 200):
                send(house, bytes(bad[:length]))
            np.testing.assert_array_equal(group.allreduce(PARTIALS[1]), PARTIALS[0] + PARTIALS[1])
            group.close()

        task = pool.submit(worker)
        group = house.join("mesh", 0)
        group.begin(5)
        np.testing.assert_array_equal(group.allreduce(PARTIALS[0]), PARTIALS[0] + PARTIALS[1])
        task.result()
        group.close()


def send(house: House, frame: bytes) -> None:
    """Send `frame`, as it is, from rank 1 to rank 0."""
    router = house.routers[1]
    assert router is not None
    sent = False
    while not sent:
        with suppress(zmq.ZMQError):  # not connected yet
            router.send_multipart([connections.identity(house.spec(1), 0), frame])
            sent = True


def serve(rank: int, name: str, pipe: Connection) -> None:
    """Run a worker process that sums until its master is lost."""
    net = Net()
    router, port = net.bind(COLLECTIVE, "127.0.0.1", 0)
    pipe.send(port)
    group = open_group(name, GroupSpec(rank, SESSION, 1, pipe.recv(), timeout_s=5), Endpoints(net, router))
    step = 0
    while pipe.recv():
        step += 1
        group.begin(step)
        group.allreduce(PARTIALS[rank])
        pipe.send(step)


@pytest.mark.parametrize("name", ["mesh", "two-shot"])
def test_an_unreachable_worker_delays_no_other(name: str) -> None:
    with House(3) as house, ThreadPoolExecutor(1) as pool, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        gone = replace(house.peers[2], address=f"tcp://127.0.0.1:{nobody.getsockname()[1]}")
        spec = replace(house.spec(1, timeout_s=10.0), peers=(*house.peers[:2], gone))

        def neighbour() -> str:  # whose turn begins with node2
            return sum_once(open_group(name, spec, house.endpoints(1)))

        task = pool.submit(neighbour)
        assert sum_once(house.join(name, 0, timeout_s=4.0)) == "node2"
        assert task.result() == "node2"


def sum_once(group: Group) -> str:
    """Sum once, and return the name of the node that was lost."""
    group.begin(1)
    with pytest.raises(NodeLost) as lost:
        group.allreduce(PARTIALS[group.rank])
    group.close()
    return lost.value.node


@pytest.mark.parametrize("name", ["star", "mesh", "two-shot"])
def test_a_killed_process_is_named(name: str) -> None:
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(2)]
    processes = [spawn.Process(target=serve, args=(rank, name, pipe[1])) for rank, pipe in enumerate(pipes, 1)]
    for process in processes:
        process.start()
    try:
        ports = [pipe.recv() for pipe, _ in pipes]
        peers = (Peer(0, "me"), *(Peer(r, f"laptop{r}", f"tcp://127.0.0.1:{p}") for r, p in enumerate(ports, 1)))
        for pipe, _ in pipes:
            pipe.send(peers)
        with closing(Net()) as net:
            group = open_group(name, GroupSpec(0, SESSION, 1, peers, timeout_s=6.0), Endpoints(net))
            with closing(group):
                for step in (1, 2):
                    for pipe, _ in pipes:
                        pipe.send(True)
                    group.begin(step)
                    expected = PARTIALS[0] + PARTIALS[1] + PARTIALS[2]
                    np.testing.assert_array_equal(group.allreduce(PARTIALS[0]), expected)
                    # the node has sent to all before it dies: one that still waited would be silent, and named, too
                    assert [pipe.recv() for pipe, _ in pipes] == [step, step]
                processes[1].kill()
                processes[1].join()
                pipes[0][0].send(True)
                group.begin(3)
                with pytest.raises(NodeLost) as lost:
                    group.allreduce(PARTIALS[0])
            assert lost.value.node == "laptop2"
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()


def test_frames_of_a_lane_that_is_not_open_are_dropped() -> None:
    """A message of a lane that the node has not opened is dropped; a message of the open lane is not."""
    with House(2) as house:
        group = house.join("star", 0)
        group.begin(5)
        for lane in (1, 63):
            send(house, LAYOUT.pack(MAGIC, VERSION, 0, 1, SESSION, 1, 5, lane << 26, 200) + PARTIALS[1].tobytes())
        send(house, LAYOUT.pack(MAGIC, VERSION, 0, 1, SESSION, 1, 5, 0, 200) + PARTIALS[1].tobytes())
        np.testing.assert_array_equal(group.allreduce(PARTIALS[0]), PARTIALS[0] + PARTIALS[1])
        assert group.stats.dropped == 2
        group.close()


def test_lanes_have_steps_of_their_own() -> None:
    """A node sends a message of a later step on one lane, while it still waits for an earlier step on another."""
    with House(2) as house, ThreadPoolExecutor(1) as pool:
        sides = [connections.Connections(house.spec(rank), house.endpoints(rank)) for rank in range(2)]
        sides[0].connect([1])
        there, back = ([side.open(lane, (0, 1)) for side in sides] for lane in (3, 5))

        def answer() -> None:
            for step in (7, 8):
                values = np.empty(2, np.float32)
                there[1].begin(step)
                there[1].receive(0, 0, values, EXACT.code)
                back[1].begin(step)
                back[1].send((0,), 0, values * 10, EXACT.code)

        task = pool.submit(answer)
        for step in (7, 8):
            there[0].begin(step)
            there[0].send((1,), 0, np.full(2, step, np.float32), EXACT.code)
        task.result()
        for step in (7, 8):
            values = np.empty(2, np.float32)
            back[0].begin(step)
            back[0].receive(1, 0, values, EXACT.code)
            assert values.tolist() == [10 * step, 10 * step]
        for side in sides:
            side.close()


def test_a_step_has_only_as_many_messages_as_can_be_numbered() -> None:
    with House(2) as house:
        side = connections.Connections(house.spec(0), house.endpoints(0))
        box = side.open(0, (0, 1))
        box.begin(1)
        box.reserve(1 << 17)
        with pytest.raises(ValueError, match="more messages"):
            box.reserve(1)
        with pytest.raises(ValueError, match="no lane 64"):
            side.open(64, (0, 1))
        side.close()
