"""Workers that are found by announcements but cannot help: the run continues without them, and says why."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from master.deployment.deploy import Deployer
from master.joining import discovery
from master.options import RunOptions
from master.session import Session
from master.workers import recruits
from master.workers.cluster import Cluster
from tests.support.cluster.cluster_helpers import REAL_WORKER
from tests.support.house import Laptop, house, timed_answer, until
from tests.support.models import TinyModel
from tpi.errors import PlanError

PROMPT, LENGTH = [5, 6, 7, 8], 6
SMALL_FILES = ("sh", "-c", 'ulimit -f 8; exec "$@"', "sh")  # 4 KiB, where shards have more: a disk that is full


def found(monkeypatch: pytest.MonkeyPatch, *laptops: Laptop, later: Sequence[Laptop] = ()) -> None:
    """Replace discovery: it finds `laptops`, which are free, and reports those in `later`, which may become free."""

    def willing(policy: object, say: object, hear: Callable[[str], None], using: object) -> list[str]:
        for one in later:
            hear(one.address)
        return [one.address for one in laptops]

    monkeypatch.setattr(discovery, "willing_at_home", willing)


def only_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the plan of the master alone fail, as with too little memory."""
    deploy = Deployer.deploy

    def refuse(self: Deployer, shares: list[float]) -> object:
        if len(shares) == 1:
            raise PlanError("master: the model does not fit")
        return deploy(self, shares)

    monkeypatch.setattr(Deployer, "deploy", refuse)


def test_a_left_out_worker_joins_when_it_can_help(
    tmp_path: Path, tiny_model: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = RunOptions(str(tiny_model("llama").directory), discover=True, cache=tmp_path / "m")
    monkeypatch.setattr(recruits, "ROOM_S", 0.1)
    monkeypatch.setattr(recruits, "RETRY_S", 0.1)

    def joined(session: Session) -> list[str]:
        """Return the nodes before and after a worker is ready and one more request has begun."""
        until(lambda: bool(session._cluster.recruits.ready))
        before = list(session.names)
        assert len(timed_answer(session, PROMPT, LENGTH).tokens) == LENGTH
        return [*before, "then", *session.names]

    with house(tmp_path, 2) as (small, busy):
        small.stop()
        small.arguments = ("--memory", "1MiB")
        small.start()
        found(monkeypatch, small, later=(busy,))
        with Cluster.connect([busy.address]) as other, Session(options) as session:
            other.close()
            assert joined(session) == ["master", "then", "master", busy.name]
            small.stop()
            small.arguments = ()
            small.start()
            assert joined(session) == ["master", busy.name, "then", "master", small.name, busy.name]


def test_workers_that_cannot_help_are_left_out(
    tmp_path: Path,
    tiny_model: Callable[[str], TinyModel],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    options = RunOptions(str(tiny_model("llama").directory), discover=True, cache=tmp_path / "m")
    with house(tmp_path, 4) as (good, full, small, busy):
        full.stop()
        full.command = (*SMALL_FILES, *REAL_WORKER)
        full.start()
        small.stop()
        small.arguments = ("--memory", "1MiB")
        small.start()
        found(monkeypatch, good, full, small, busy)
        with Cluster.connect([busy.address]), Session(options) as session:
            assert session.names == ("master", good.name)
            assert len(timed_answer(session, PROMPT, LENGTH).tokens) == LENGTH
        lines = [line for line in capfd.readouterr().err.splitlines() if "going on with" in line]
        found(monkeypatch, full)
        only_with_others(monkeypatch)
        with pytest.raises(PlanError, match="master: the model does not fit"), Session(options):
            pass
    used, little, disk = (
        next(line for line in lines if words in line) for words in ("is in use by", "too little", "disk full")
    )
    assert f"worker {busy.address} " in used
    assert used.endswith("; going on without it")
    assert f"{small.name}: 1MiB of memory" in little
    assert little.endswith(f"; going on without {small.name}")
    assert f"worker {full.name} ({full.address}): " in disk
    assert disk.endswith("; going on with master, a")
