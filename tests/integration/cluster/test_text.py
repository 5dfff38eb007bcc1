"""Text from other machines: a name that cannot be sent ends no process, and terminal commands are made harmless."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from master.reporting.report import NodeReport, print_nodes
from master.workers.cluster import Cluster
from tests.support.cluster.cluster_helpers import MadeUpModel, fake_worker, step
from tests.support.paths import ROOT
from tests.support.processes.fake_worker import NONSENSE, QUIT, STUCK
from tests.support.processes.hostile_worker import Hostile, hostile
from tpi import __version__
from tpi.errors import MessageError, NodeError, NodeLost, UsageError
from tpi.net.codec import encode
from tpi.net.messages import Assign, Failure, Join
from tpi.text import plain
from worker.service.options import WorkerOptions

NASTY = "\x1b[31m[bold]x[/]\x9b1m\r\n\u202edown"


def test_plain_text_is_printable_short_and_utf8() -> None:
    assert plain(NASTY) == "?[31m[bold]x[/]?1m  ?down"
    assert plain("caf\u00e9 \udcff " + "n" * 300) == "caf\u00e9 ? " + "n" * 249
    assert plain("a\tb\nc") == "a b c"


@pytest.mark.parametrize("name", ["", "n" * 257, "bad\udcff", "a\x1b[31m", "two\nlines"])
def test_a_name_that_cannot_be_sent_is_refused_at_the_start(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--name takes printable text"):
        WorkerOptions("127.0.0.1", 0, name, tmp_path)


def test_a_worker_with_such_a_name_is_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "worker.commands", "--listen", "127.0.0.1:0", "--cache", str(tmp_path)]
    done = subprocess.run([*command, "--name", b"\xff\xfe"], cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    with pytest.raises(UsageError, match="more than any machine"):
        WorkerOptions("127.0.0.1", 0, "n", tmp_path, memory=1 << 63)


def test_text_that_is_not_utf8_is_a_message_error() -> None:
    with pytest.raises(MessageError, match="not UTF-8"):
        encode(Join(__version__, 1, "\udcff"))


def test_a_worker_outlives_the_loss_of_its_cache_directory(tmp_path: Path) -> None:
    model, cache = MadeUpModel(), tmp_path / "cache"
    with fake_worker(cache, "--name", "w") as (process, address):
        shutil.rmtree(cache)
        with Cluster.connect([address]) as cluster:
            (ready,) = cluster.assign(model.split(cluster.session, 1, cluster.peers(), 8)[1:], model)
            assert ready.fetched_bytes
        cache.rename(tmp_path / "elsewhere")  # at once: the worker may still be leaving that master
        cache.write_text("a file where the directory was")
        with Cluster.connect([address]) as cluster, pytest.raises(NodeError, match=rf"worker w .*{cache}"):
            cluster.assign(model.split(cluster.session, 1, cluster.peers(), 8)[1:], model)
        assert process.poll() is None


def test_figures_that_cannot_be_sent_are_a_named_error(tmp_path: Path) -> None:
    model = MadeUpModel()
    with fake_worker(tmp_path / "c", "--name", "w") as (process, address):
        with Cluster.connect([address]) as cluster:
            cluster.assign(model.split(cluster.session, 1, cluster.peers(), 8)[1:], model)
            cluster.step(step(cluster.session, 1, 0, NONSENSE))
            with pytest.raises(NodeError, match=r"worker w .*its Stats cannot be sent: compute_s"):
                cluster.stats()
        with Cluster.connect([address]):
            assert process.poll() is None


def test_an_error_on_close_does_not_end_the_compute_thread(tmp_path: Path) -> None:
    model = MadeUpModel()
    with fake_worker(tmp_path / "c") as (_, address):
        with Cluster.connect([address]) as cluster:
            cluster.assign(model.split(cluster.session, 1, cluster.peers(), 8)[1:], model)
            cluster.step(step(cluster.session, 1, 0, STUCK))
            cluster.stats()
        with Cluster.connect([address]) as cluster:
            cluster.assign(model.split(cluster.session, 1, cluster.peers(), 8)[1:], model)
            cluster.step(step(cluster.session, 1, 0))
            assert cluster.stats()[0].steps == 1


def test_a_compute_thread_that_ends_ends_the_worker_and_says_so(tmp_path: Path) -> None:
    model = MadeUpModel()
    with fake_worker(tmp_path / "c", "--name", "w") as (process, address), Cluster.connect([address]) as cluster:
        cluster.assign(model.split(cluster.session, 1, cluster.peers(), 8)[1:], model)
        cluster.step(step(cluster.session, 1, 0, QUIT))
        with pytest.raises(NodeError, match=r"worker w .*its compute thread ended \(SystemExit: told to quit\)"):
            cluster.stats()
        assert process.wait(20) == 1


def test_texts_of_a_worker_reach_no_terminal_as_commands() -> None:
    def fails(_: Hostile, message: object) -> list[object]:
        return [Failure(message.session, 1, NASTY, NASTY)] if isinstance(message, Assign) else []

    model = MadeUpModel()
    with hostile(fails, name=NASTY) as worker, Cluster.connect([worker.address]) as cluster:
        assert cluster.workers[0].name == plain(NASTY)
        with pytest.raises(NodeError) as caught:
            cluster.assign(model.split(cluster.session, 1, cluster.peers(), 8)[1:], model)
    assert str(caught.value).isprintable()
    assert caught.value.node.isprintable()
    assert not isinstance(caught.value, NodeLost)


def test_a_name_in_brackets_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    name = "[red]lamp[/nothing]"
    figures = (0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    print_nodes([NodeReport(name, 1, [[0, 1]], [0, 1], [0, 1], [0, 1], *figures, steady=None)], "1 node")
    assert name in capsys.readouterr().out
