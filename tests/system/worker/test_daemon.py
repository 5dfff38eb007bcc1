"""The worker's process: its footprint, its behaviour, its limits; and workers that a master starts itself."""

import json
import os
import signal
import socket as plain
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import zmq

from master.workers.cluster import Cluster
from master.workers.local import LocalWorkers
from tests.support.cluster.cluster_helpers import FAKE_WORKER, MadeUpModel, fake_worker, step
from tests.support.house import until
from tests.support.paths import ROOT
from tpi.errors import NodeLost
from tpi.net.codec import FRAME_BYTES, Buffer, encode
from tpi.net.messages import Bye, Join
from tpi.net.sockets import CONTROL, WEIGHTS, Net, split_address

pytestmark = pytest.mark.bare

TOO_LARGE = {"torch", "transformers", "tokenizers", "jinja2", "safetensors", "huggingface_hub"}
DROPPED = 5  # at least: what is forged on the control plane but for the Join, which is answered, beside the noise
WORKER = (sys.executable, "-m", "worker.commands")


def start(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*WORKER, *arguments], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_a_real_worker_is_small_and_leaves_cleanly(tmp_path: Path) -> None:
    with start("--listen", "127.0.0.1:0", "--name", "laptop", "--cache", str(tmp_path), "--memory", "1GiB") as process:
        assert process.stdout
        assert process.stderr
        line = process.stdout.readline().decode()
        assert line.startswith("worker laptop listens on 127.0.0.1:")
        assert psutil.Process(process.pid).memory_info().rss < 90 << 20
        with Cluster.connect([line.split()[4]]) as cluster:
            (hello,) = cluster.hellos
            assert hello.profile.memory_limit == 1 << 30
            assert hello.profile.cores >= 1
            assert hello.profile.memory_total >= hello.profile.memory_free > 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert b"Traceback" not in process.stderr.read()


def test_a_worker_imports_nothing_large() -> None:
    modules = "worker.commands, worker.service.daemon, worker.node.build"
    code = f"import json, sys, {modules}; print(json.dumps(sorted(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    assert not TOO_LARGE & set(json.loads(found.stdout))


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_a_port_in_use_is_one_sentence(tmp_path: Path, offset: int) -> None:
    with plain.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [*WORKER, "--listen", f"127.0.0.1:{port - offset}", "--cache", str(tmp_path)],
            cwd=ROOT, capture_output=True, timeout=30, check=False,
        )  # fmt: skip
    said = done.stderr.decode()
    assert done.returncode == 2
    assert f"port {port} " in said or "in use" in said
    assert "Traceback" not in said
    assert len(said.strip().splitlines()) == 1


@pytest.mark.parametrize("listen", ["nonsense", "127.0.0.1:70000", "192.0.2.1:0"])
def test_a_wrong_address_is_one_sentence(tmp_path: Path, listen: str) -> None:
    done = subprocess.run(
        [*WORKER, "--listen", listen, "--cache", str(tmp_path)], cwd=ROOT, capture_output=True, timeout=30, check=False
    )
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1


def test_malformed_oversized_or_hostile_message(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Such messages are dropped and counted; they raise no exception, take little memory, and the run continues."""
    model = MadeUpModel()
    net = Net()
    with fake_worker(tmp_path / "a") as (process, address), Cluster.connect([address]) as cluster:
        cluster.assign(model.split(cluster.session, 1, cluster.peers())[1:], model)
        before = psutil.Process(process.pid).memory_info().rss
        assert cluster.hellos[0].weights_port
        host, port = split_address(address)
        for plane, target in ((CONTROL, port), (WEIGHTS, cluster.hellos[0].weights_port)):
            stranger = net.connect(plane, host, target, b"stranger")
            stranger.setsockopt(zmq.SNDTIMEO, 5000)
            messages = (Bye(cluster.session), step(cluster.session, 1, 0), Join("0", 1, "x"))
            forged: list[list[Buffer]] = [encode(each) for each in messages]
            forged += [[b"junk"], [b"\xc1" * 1000] * 30, [b"", b"", b""]]
            for frames in forged:
                stranger.send_multipart([bytes(frame) for frame in frames])
            stranger.close(1000)
            giant = net.connect(plane, host, target, b"giant")
            giant.setsockopt(zmq.SNDTIMEO, 5000)
            giant.send(bytes(64 * FRAME_BYTES))
            giant.close(200)
            with plain.create_connection((host, target)) as raw:
                raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(4000))
        cluster.step(step(cluster.session, 1, 0))
        until(lambda: cluster.stats()[0].dropped >= DROPPED)
        assert cluster.stats()[0].steps == 1
        assert psutil.Process(process.pid).memory_info().rss - before < 16 << 20
    net.close()
    assert "Traceback" not in capfd.readouterr().err


def test_an_attached_worker_leaves_with_its_parent(tmp_path: Path) -> None:
    parent = (
        "import subprocess, sys, time; p = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE);"
        "print(p.pid, flush=True); time.sleep(60)"
    )
    command = [*FAKE_WORKER, "--attached", "--cache", str(tmp_path)]
    with subprocess.Popen([sys.executable, "-c", parent, *command], cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout
        child = psutil.Process(int(process.stdout.readline()))
        assert b"listens on" in process.stdout.readline()
        process.kill()
        child.wait(30)


def test_local_workers_start_and_stop_together(tmp_path: Path) -> None:
    model = MadeUpModel()
    for expected in (29184, 0):
        with LocalWorkers([()] * 2, tmp_path, command=[*FAKE_WORKER]) as local:
            pids = [process.pid for process in local._processes]
            with Cluster.connect(local.addresses) as cluster:
                assert [hello.name for hello in cluster.hellos] == ["worker-1", "worker-2"]
                ready = cluster.assign(model.split(cluster.session, 1, cluster.peers())[1:], model)
                assert [answer.fetched_bytes for answer in ready] == [expected, expected]
        assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_local_worker_that_stands_still_is_ended_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("master.workers.local.STOP_S", 0.5)
    with LocalWorkers([()], tmp_path, command=[*FAKE_WORKER]) as local:
        (process,) = local._processes
        os.kill(process.pid, signal.SIGSTOP)
    assert not psutil.pid_exists(process.pid)


def test_a_local_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no room here')"]
    with pytest.raises(NodeLost, match=r"worker-1 did not start: no room here"):
        LocalWorkers([()] * 2, tmp_path, command=command).__enter__()


def test_two_clusters_at_once(tmp_path: Path) -> None:
    model = MadeUpModel()

    def run(results: list[int]) -> None:
        with LocalWorkers([()], tmp_path, command=[*FAKE_WORKER]) as local, Cluster.connect(local.addresses) as cluster:
            cluster.assign(model.split(cluster.session, 1, cluster.peers(), 8)[1:2], model)
            cluster.step(step(cluster.session, 1, 0))
            results.append(cluster.stats()[0].steps)

    results: list[int] = []
    threads = [threading.Thread(target=run, args=(results,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == [1, 1]
