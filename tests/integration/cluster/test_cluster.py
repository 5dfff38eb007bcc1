"""Master and workers as real processes: connect, assign, transfer, step, count, and every way to lose a worker."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from master.workers.cluster import Cluster
from tests.support.cluster.cluster_helpers import MadeUpModel, fake_workers, step
from tests.support.house import until, until_error
from tests.support.processes.fake_worker import BLAME, EXCHANGE, FAIL, HANG, SWELL, SWELL_BYTES
from tpi.errors import NodeError, NodeLost, NodeRefused
from tpi.net.sockets import Net
from tpi.net.transfers import Need
from tpi.system.clocks import since_boot
from worker.service.daemon import HEARTBEAT_S

Pids = list[int]
HOST = rf".*process {os.getpid()}"


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[tuple[Pids, list[str]]]:
    """Two workers."""
    with fake_workers([tmp_path / "a", tmp_path / "b"]) as (processes, addresses):
        yield [process.pid for process in processes], addresses


def test_a_whole_run(workers: tuple[Pids, list[str]]) -> None:
    model = MadeUpModel()
    seen: list[tuple[int, int]] = []
    with Cluster.connect(workers[1]) as cluster:
        assert [hello.name for hello in cluster.hellos] == ["a", "b"]
        assert [peer.name for peer in cluster.peers()] == ["master", "a", "b"]
        plans = model.split(cluster.session, 1, cluster.peers())[1:]
        ready = cluster.assign(plans, model, lambda done, total: seen.append((done, total)))
        assert [answer.pages for answer in ready] == [5, 6]
        assert [answer.weight_bytes for answer in ready] == [28672, 28672]
        assert seen[-1] == (58368, 58368)
        for number in range(20):
            cluster.step(step(cluster.session, 1, number, tokens=2))
        stats = cluster.stats()
        assert [each.steps for each in stats] == [20, 20]
        assert [each.tokens for each in stats] == [40, 40]
        assert all(1 << 20 < each.peak_rss_bytes < 90 << 20 for each in stats)
        assert cluster.watch(1) in (True, False)


def test_workers_keep_shards_for_another_master_and_split(workers: tuple[Pids, list[str]]) -> None:
    model = MadeUpModel()
    fetched = []
    for cut in (4, 4, 6):
        with Cluster.connect(workers[1]) as cluster:
            ready = cluster.assign(model.split(cluster.session, 1, cluster.peers(), cut)[1:], model)
            fetched.append([answer.fetched_bytes for answer in ready])
    assert fetched == [[29184, 29184], [0, 0], [14336, 0]]


def test_a_new_plan_replaces_the_old_one_and_fences_it(workers: tuple[Pids, list[str]]) -> None:
    model = MadeUpModel()
    with Cluster.connect(workers[1]) as cluster:
        for epoch in (1, 2):
            cluster.assign(model.split(cluster.session, epoch, cluster.peers())[1:], model)
        for stale in (step(cluster.session, 1, 0), step(cluster.session + 1, 2, 0)):
            cluster.step(stale)
        cluster.step(step(cluster.session, 2, 0))
        stats = cluster.stats()
        assert [each.steps for each in stats] == [1, 1]
        assert [each.dropped for each in stats] == [2, 2]


def test_messages_of_an_old_plan_are_dropped_by_the_master(workers: tuple[Pids, list[str]]) -> None:
    """A stopped worker wakes and sends a heartbeat of the plan that it knows. The master has another plan by then."""
    model = MadeUpModel()
    with Cluster.connect(workers[1]) as cluster:
        cluster.assign(model.split(cluster.session, 1, cluster.peers())[1:], model)
        zombie = cluster.workers[0]
        cluster.stats()
        until(lambda: zombie.heartbeats.phase == "idle")
        os.kill(workers[0][0], signal.SIGSTOP)
        until(lambda: since_boot() - zombie.heartbeats.seen > 2 * HEARTBEAT_S)
        before, progress = zombie.dropped, zombie.heartbeats.progress
        cluster.begin(model.split(cluster.session, 2, cluster.peers())[1:], model)
        os.kill(workers[0][0], signal.SIGCONT)
        until(lambda: zombie.dropped > before)
        assert zombie.heartbeats.progress == progress
        assert len(cluster.finish()) == 2
        cluster.step(step(cluster.session, 2, 0))
        assert [each.steps for each in cluster.stats()] == [1, 1]


def test_a_worker_plans_with_the_memory_that_it_advertised(workers: tuple[Pids, list[str]]) -> None:
    model = MadeUpModel()
    with Cluster.connect(workers[1]) as cluster:
        cluster.assign(model.split(cluster.session, 1, cluster.peers())[1:], model)
        advertised = [hello.profile.memory_free for hello in cluster.hellos]
        assert [each.planned_bytes for each in cluster.stats()] == advertised


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs a /proc where peaks can be reset")
def test_the_peak_of_a_plan_is_its_own(workers: tuple[Pids, list[str]]) -> None:
    model = MadeUpModel()
    peaks = []
    with Cluster.connect(workers[1]) as cluster:
        for epoch, value in ((1, SWELL), (2, 1.0)):
            cluster.assign(model.split(cluster.session, epoch, cluster.peers())[1:], model)
            cluster.step(step(cluster.session, epoch, 0, value))
            peaks.append([each.peak_rss_bytes for each in cluster.stats()])
    for before, after in zip(*peaks, strict=True):
        assert before - after > SWELL_BYTES // 2


def test_an_abort_ends_an_exchange(workers: tuple[Pids, list[str]]) -> None:
    model = MadeUpModel()
    with Cluster.connect(workers[1]) as cluster:
        for epoch in (1, 2):
            cluster.assign(model.split(cluster.session, epoch, cluster.peers())[1:], model)
            cluster.step(step(cluster.session, epoch, 0, EXCHANGE))
            cluster.abort()
        cluster.assign(model.split(cluster.session, 3, cluster.peers())[1:], model)
        assert [each.steps for each in cluster.stats()] == [0, 0]


def test_a_worker_that_computes_on_is_reported_when_stopped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = MadeUpModel()
    with fake_workers([tmp_path / "a"]) as ((process,), addresses):
        with Cluster.connect(addresses) as cluster:
            cluster.assign(model.split(cluster.session, 1, cluster.peers(), 8)[1:], model)
            cluster.step(step(cluster.session, 1, 0, HANG))
            until(lambda: cluster.workers[0].heartbeats.phase == "compute")
        process.terminate()
        assert process.wait(30) == 1
    assert "the computation of worker a did not stop; the process exits without it" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (signal.SIGKILL, r"worker b \(127.0.0.1:\d+\) is lost: it closed the connection"),
        (signal.SIGTERM, r"worker b .* is lost: it was stopped"),
        (signal.SIGSTOP, r"worker b .* is lost: nothing was heard from it"),
    ],
)
def test_a_lost_worker_is_noticed_and_named(
    workers: tuple[Pids, list[str]], number: signal.Signals, message: str
) -> None:
    """Each loss is noticed by the earliest sign of it, long before a deadline of sums."""
    model = MadeUpModel()
    with Cluster.connect(workers[1]) as cluster:
        cluster.assign(model.split(cluster.session, 1, cluster.peers())[1:], model)
        os.kill(workers[0][1], number)
        error = until_error(cluster.poll, NodeLost)
        os.kill(workers[0][1], signal.SIGCONT)
    assert error.args[0].startswith("worker b")
    with pytest.raises(NodeLost, match=message):
        raise error


@pytest.mark.parametrize(
    ("value", "node", "message"),
    [(FAIL, "a", "worker a .*ValueError: told to fail"), (BLAME, "another", "another node is lost")],
)
def test_a_failure_in_a_step_reaches_the_master(
    workers: tuple[Pids, list[str]], value: float, node: str, message: str
) -> None:
    model = MadeUpModel()
    with Cluster.connect(workers[1]) as cluster:
        cluster.assign(model.split(cluster.session, 1, cluster.peers())[1:], model)
        cluster.step(step(cluster.session, 1, 0, value))
        error = until_error(cluster.poll, NodeError)
        assert isinstance(error, NodeError)
        assert error.node in (node, "b")
    with pytest.raises(NodeError, match=message.replace("worker a", "worker [ab]")):
        raise error


def test_a_hung_computation_shows_in_its_progress(workers: tuple[Pids, list[str]]) -> None:
    model = MadeUpModel()
    with Cluster.connect(workers[1]) as cluster:
        cluster.assign(model.split(cluster.session, 1, cluster.peers())[1:], model)
        heartbeats = cluster.workers[0].heartbeats
        cluster.step(step(cluster.session, 1, 0, HANG))

        def hangs() -> bool:
            """Return True if the worker still sends heartbeats, but its node computes nothing."""
            cluster.watch(1)
            return heartbeats.phase == "compute" and heartbeats.seen - heartbeats.advanced > 0.5

        until(hangs)
        assert not cluster.watch(1)


def test_a_killed_master_frees_its_workers(workers: tuple[Pids, list[str]]) -> None:
    model = MadeUpModel()
    cluster = Cluster.connect(workers[1])
    cluster.assign(model.split(cluster.session, 1, cluster.peers())[1:], model)
    cluster.step(step(cluster.session, 1, 0, EXCHANGE))
    cluster._keeper.stop()
    cluster.net.close()  # as when the process is killed: no goodbye
    with Cluster.connect(workers[1]) as successor:  # in its time for connecting; heartbeats to the first end at once
        ready = successor.assign(model.split(successor.session, 1, successor.peers())[1:], model)
        assert [answer.fetched_bytes for answer in ready] == [0, 0]


def test_a_worker_in_use_refuses_by_name(workers: tuple[Pids, list[str]]) -> None:
    with Cluster.connect(workers[1]) as cluster:
        with pytest.raises(NodeRefused, match=rf"worker .* in use by {HOST}"):
            Cluster.connect(workers[1][:1])
        cluster.poll()
    Cluster.connect(workers[1][:1]).close()


def test_workers_of_one_name_are_told_apart(tmp_path: Path) -> None:
    with (
        fake_workers([tmp_path / "a", tmp_path / "b"], "--name", "fake") as (_, (first, second)),
        Cluster.connect([first, second]) as cluster,
    ):
        assert [peer.name for peer in cluster.peers()][1:] == [f"fake ({first})", f"fake ({second})"]


def test_an_unreachable_worker_is_told_how_to_listen() -> None:
    with pytest.raises(NodeLost, match=r"at 127\.0\.0\.1:9 \(connection refused\); .*tpi worker --listen 0\.0\.0\.0:9"):
        Cluster.connect(["127.0.0.1:9"])


def test_units_that_arrive_damaged_fail_in_one_sentence(workers: tuple[Pids, list[str]]) -> None:
    model = MadeUpModel()

    class Liar:
        def read(self, need: Need) -> memoryview:
            return memoryview(bytes(len(model.read(need))))

    with Cluster.connect(workers[1]) as cluster, pytest.raises(NodeError, match="arrived damaged 3 times"):
        cluster.assign(model.split(cluster.session, 1, cluster.peers())[1:], Liar())


def test_many_small_blocks_arrive(workers: tuple[Pids, list[str]]) -> None:
    model = MadeUpModel(layers=40, width=1, units=2)
    with Cluster.connect(workers[1]) as cluster:
        ready = cluster.assign(model.split(cluster.session, 1, cluster.peers(), 1)[1:], model)
    assert all(answer.fetched_bytes > answer.weight_bytes > 0 for answer in ready)


def test_a_weights_connection_that_breaks_starts_again(workers: tuple[Pids, list[str]]) -> None:
    """Transfers in progress are void. The worker requests the units again over the new connection."""
    model = MadeUpModel(layers=1, width=64, units=256)

    class Cut:
        def __init__(self, cluster: Cluster) -> None:
            self.cluster, self.reads = cluster, 0

        def read(self, need: Need) -> memoryview:
            self.reads += 1
            feeder = self.cluster.workers[0].feeder
            if self.reads == 6 and feeder:
                where = feeder.channel.socket.getsockopt_string(zmq.LAST_ENDPOINT)
                feeder.channel.socket.disconnect(where)
                feeder.channel.socket.connect(where)
            return model.read(need)

    with Cluster.connect(workers[1]) as cluster:
        ready = cluster.assign(model.split(cluster.session, 1, cluster.peers(), 128)[1:], Cut(cluster))
    assert ready[0].fetched_bytes == ready[0].weight_bytes + 256


def test_no_message_but_a_step_and_units_carries_data(workers: tuple[Pids, list[str]]) -> None:
    """The master sends control fields, hashes, hidden states and units. No other message has room for text."""
    frames: list[bytes] = []
    net = Net(tap=lambda way, parts: frames.extend(map(bytes, parts)) if way == "sent" else None)
    model = MadeUpModel()
    with Cluster.connect(workers[1], net) as cluster:
        cluster.assign(model.split(cluster.session, 1, cluster.peers())[1:], model)
        cluster.step(step(cluster.session, 1, 0, value=0.125))
        cluster.stats()
    names = {name for name in (b"Join", b"Assign", b"Step", b"UnitData", b"Offer", b"AskStats", b"Bye")
             if any(name in frame[:16] for frame in frames)}  # fmt: skip
    assert len(names) == 7
    assert all(model.units[key].tobytes() not in b"".join(frames) for key in model.units if key[1] == "neuron")
