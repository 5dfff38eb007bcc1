"""Workers are killed, frozen and woken while a model answers; each test is named after the fault that it injects."""

import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from master.options import RunOptions
from master.session import Session
from master.workers.asking import ask
from master.workers.remote import RemoteWorker
from tests.support.commands import TPI, clean
from tests.support.figures import assert_figures
from tests.support.house import Laptop, at_random_moment, during_step, house, timed_answer, until
from tests.support.models import TinyModel
from tests.support.stillness import Stillness
from tpi.config import default_cache
from tpi.errors import NodeError
from tpi.net.sockets import Net
from tpi.pack.library.pull import pull

PROMPT = [5, 6, 7, 8]
LENGTH = 40
AT_ONCE_S = 25.0  # 10 on an idle machine; waiting for a deadline takes 30
MiB = 1 << 20
KEPT = 8 * MiB  # of a worker that is idle again: code that was loaded, and what the allocator keeps


@pytest.fixture
def model(tiny_model: Callable[[str], TinyModel]) -> str:
    return str(tiny_model("llama").directory)


@pytest.fixture
def home(tmp_path: Path, model: str) -> Iterator[tuple[Session, list[Laptop]]]:
    """A session on three workers and the master, and the three workers."""
    with house(tmp_path, 3) as laptops:
        options = RunOptions(model, workers=tuple(one.address for one in laptops), cache=tmp_path / "master")
        with Session(options) as session:
            yield session, laptops


def names(session: Session) -> tuple[str, ...]:
    """Return the names of the nodes."""
    return session.names


def expected(session: Session) -> list[int]:
    return timed_answer(session, PROMPT, LENGTH).tokens


def everybody(session: Session, count: int = 4) -> None:
    """Wait until all workers are back and in use."""
    cluster = session._cluster
    until(lambda: len(cluster.workers) + len(cluster.recruits.ready) == count - 1)
    timed_answer(session, PROMPT, 1)
    assert len(names(session)) == count


class Noticed:
    """Records the time at which the master of a session takes a worker for lost."""

    def __init__(self, session: Session, patch: pytest.MonkeyPatch) -> None:
        self.at = 0.0  # on `time.monotonic`
        self._part = session._cluster.part
        patch.setattr(session._cluster, "part", self._noted)

    def _noted(self, error: NodeError) -> list[RemoteWorker]:
        self.at = time.monotonic()
        return self._part(error)


def test_worker_killed_mid_token(home: tuple[Session, list[Laptop]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is noticed within 1 s, and the answer continues with the other workers within 10 s."""
    session, laptops = home
    wanted, noticed = expected(session), Noticed(session, monkeypatch)
    killed, said = list[float](), list[str]()
    monkeypatch.setattr(session._membership, "warn", said.append)

    def at(count: int) -> None:
        if count == 15:
            killed.append(time.monotonic())
            laptops[1].signal(signal.SIGKILL)

    def strike(number: int) -> dict[str, float]:
        if number:
            laptops[1].start()
            everybody(session)
        with Stillness() as host:
            spoken = timed_answer(session, PROMPT, LENGTH, at)
        assert spoken.tokens == wanted
        assert "b" not in names(session)
        assert host.excuses or names(session) == ("master", "a", "c")
        return {"noticed": noticed.at - killed[-1], "goes on": spoken.pause}

    assert_figures("worker killed mid-token", {"noticed": 1.0, "goes on": 10.0}, strike)
    lost = next(sentence for sentence in reversed(said) if sentence.startswith("worker b ("))
    assert "is lost" in lost
    assert lost.endswith("going on with " + ", ".join(names(session)))


def test_worker_frozen_then_woken(home: tuple[Session, list[Laptop]], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is lost within 3 s. Its messages after waking change nothing, and it joins again."""
    session, laptops = home
    wanted, noticed = expected(session), Noticed(session, monkeypatch)
    frozen = list[float]()

    def at(count: int) -> None:
        if count == 10:
            frozen.append(time.monotonic())
            laptops[2].signal(signal.SIGSTOP)
        if count == 30:
            laptops[2].signal(signal.SIGCONT)

    def strike(number: int) -> dict[str, float]:
        spoken = timed_answer(session, PROMPT, LENGTH, at)
        assert spoken.tokens == wanted
        everybody(session)
        assert names(session) == ("master", "a", "b", "c")  # in its old place, where its shards are those that it has
        ready = session._cluster.workers[2].ready
        assert ready is not None
        assert ready.fetched_bytes == 0
        return {"noticed": noticed.at - frozen[-1], "goes on": spoken.pause}

    assert_figures("worker frozen, then woken", {"noticed": 3.0, "goes on": 10.0}, strike)
    assert timed_answer(session, PROMPT, LENGTH).tokens == wanted


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
def test_kills_and_freezes_at_random_moments(home: tuple[Session, list[Laptop]], kind: signal.Signals) -> None:
    session, laptops = home
    wanted = expected(session)
    for seed in range(5):
        hit: list[Laptop] = []

        def strike(drawn: random.Random, hit: list[Laptop] = hit) -> None:
            hit.append(drawn.choice(laptops))
            hit[0].signal(kind)

        with during_step(seed, LENGTH, strike) as heard:
            spoken = timed_answer(session, PROMPT, LENGTH, heard)
        assert hit
        assert spoken.tokens == wanted, f"seed {seed}"
        assert spoken.pause < AT_ONCE_S
        if kind == signal.SIGKILL:
            hit[0].start()
        else:
            hit[0].signal(signal.SIGCONT)
        left_clients(session)


def left_clients(session: Session) -> None:
    """A worker that is killed after the last token is noticed only at the next request."""
    timed_answer(session, PROMPT, 3)
    everybody(session)


def test_two_die_at_once_and_the_master_goes_on_alone(home: tuple[Session, list[Laptop]]) -> None:
    session, laptops = home
    wanted = expected(session)

    def at(count: int) -> None:
        if count == 8:
            laptops[0].signal(signal.SIGKILL)
            laptops[1].signal(signal.SIGKILL)
        if count == 20:
            laptops[2].signal(signal.SIGKILL)

    assert timed_answer(session, PROMPT, LENGTH, at).tokens == wanted
    assert names(session) == ("master",)  # others that were silent count as dead, too


def test_a_worker_that_comes_back_is_used_from_the_next_request(home: tuple[Session, list[Laptop]]) -> None:
    session, laptops = home
    wanted = expected(session)

    def at(count: int) -> None:
        if count == 5:
            laptops[0].signal(signal.SIGKILL)
        if count == 10:
            laptops[0].start()
            until(lambda: bool(session._cluster.recruits.ready))

    with Stillness() as host:
        assert timed_answer(session, PROMPT, LENGTH, at).tokens == wanted
        assert host.excuses or names(session) == ("master", "b", "c")
        assert timed_answer(session, PROMPT, LENGTH).tokens == wanted
    assert host.excuses or names(session) == ("master", "a", "b", "c")


def test_a_worker_that_comes_back_is_used_at_once_with_rebalance(tmp_path: Path, model: str) -> None:
    with house(tmp_path, 2) as laptops:
        addresses = tuple(one.address for one in laptops)
        with Session(RunOptions(model, workers=addresses, cache=tmp_path / "m", rebalance=True)) as session:
            wanted = expected(session)
            epochs = []

            def at(count: int) -> None:
                if count == 5:
                    laptops[0].signal(signal.SIGKILL)
                if count == 10:
                    laptops[0].start()
                    until(lambda: bool(session._cluster.recruits.ready))
                epochs.append(session.engine.deployment.epoch)

            with Stillness() as host:
                assert timed_answer(session, PROMPT, LENGTH, at).tokens == wanted
            assert host.excuses or names(session) == ("master", "a", "b")
            assert host.excuses or len(set(epochs)) == 3


def tight(model: str, tmp_path: Path, laptops: list[Laptop], **more: float) -> RunOptions:
    """Return options for a session with one worker, which the master is then made to need (`too_small_alone`)."""
    options = RunOptions(model, workers=(laptops[0].address,), cache=tmp_path / "m")
    return replace(options, patience=more.get("patience", 60.0))


def too_small_alone(session: Session, patch: pytest.MonkeyPatch) -> None:
    """Make the plan of a master without workers fail, as with too little memory."""
    from tpi.errors import PlanError

    deployer = session._deployer
    deploy = type(deployer).deploy

    def refuse(self: object, shares: list[float]) -> object:
        if len(shares) == 1:
            raise PlanError("master: the model does not fit")
        return deploy(deployer, shares)

    patch.setattr(type(deployer), "deploy", refuse)


def test_a_lid_that_closes_and_opens_again_costs_a_pause(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The other nodes cannot hold the model.

    A message says so, tokens are kept, and the answer continues when the laptop is back.
    """
    with house(tmp_path, 1) as laptops, Session(tight(model, tmp_path, laptops)) as session, ExitStack() as stack:
        wanted = expected(session)
        too_small_alone(session, monkeypatch)

        def at(count: int) -> None:
            if count == 12:
                laptops[0].signal(signal.SIGSTOP)
                opens = at_random_moment(0, 0, lambda drawn: wake(session, laptops[0]))
                stack.enter_context(opens)

        assert timed_answer(session, PROMPT, LENGTH, at).tokens == wanted
        assert names(session) == ("master", "a")
    said = capfd.readouterr().err
    assert "does not fit. Waiting 60 s for workers to come back; no tokens are lost" in said
    assert "a joined" in said


def wake(session: Session, laptop: Laptop) -> None:
    """Wake the laptop, once the master has noticed that it is asleep."""
    until(lambda: not session._cluster.workers)
    laptop.signal(signal.SIGCONT)


def test_patience_ends(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with house(tmp_path, 1) as laptops, Session(tight(model, tmp_path, laptops, patience=0.5)) as session:
        too_small_alone(session, monkeypatch)
        made: list[int] = []

        def at(count: int) -> None:
            made.append(count)
            if count == 12:
                laptops[0].signal(signal.SIGKILL)

        with pytest.raises(NodeError, match=r"no worker came back within 0\.5 s; .*does not fit"):
            timed_answer(session, PROMPT, LENGTH, at)
        assert len(made) == 12


def test_master_killed(tmp_path: Path) -> None:
    """Its workers are free within 1 s, release their memory, keep their shards, and serve the next one within 10 s."""
    model = str(pull("smollm2-135m", default_cache()))
    with house(tmp_path, 2) as laptops, closing(Net()) as net:
        workers = tuple(one.address for one in laptops)
        idle = [one.memory for one in laptops]

        def killed() -> float:
            """Kill a master that has workers; return the time."""
            with serving(model, workers, tmp_path / "m") as master:
                used = [one.memory - before for one, before in zip(laptops, idle, strict=True)]
                assert min(used) > 2 * KEPT
                master.kill()
                return time.monotonic()

        def strike(number: int) -> dict[str, float]:
            at = killed()
            until(lambda: all(free(net, one.address) for one in laptops))
            freed = time.monotonic() - at
            with Session(RunOptions(model, workers=workers, cache=tmp_path / "m", context=64)) as session:
                assert len(timed_answer(session, PROMPT, 1).tokens) == 1
                took = time.monotonic() - at
                ready = [worker.ready for worker in session._cluster.workers]
                assert [one.fetched_bytes for one in ready if one] == [0, 0]
            return {"free": freed, "next master served": took}

        killed()
        until(lambda: all(one.memory < before + KEPT for one, before in zip(laptops, idle, strict=True)))
        assert_figures("master killed", {"free": 1.0, "next master served": 10.0}, strike)


def free(net: Net, address: str) -> bool:
    """Return True if a worker says that it has no master."""
    (asked,) = ask(net, [address])
    return asked.condition is not None and not asked.condition.used_by


def test_a_dismissed_worker_is_idle_and_free(tmp_path: Path) -> None:
    """It releases its memory, keeps its shards, and serves the next master; the other workers answer on."""
    model = str(pull("smollm2-135m", default_cache()))
    with house(tmp_path, 2) as laptops:
        workers, idle = tuple(one.address for one in laptops), laptops[1].memory
        with Session(RunOptions(model, workers=workers, cache=tmp_path / "m", context=64)) as session:
            assert laptops[1].memory > idle + 2 * KEPT
            session._cluster.dismiss(session._cluster.workers[1:])
            session.deploy([1.0, 1.0])
            assert len(timed_answer(session, PROMPT, 3).tokens) == 3
            assert names(session) == ("master", "a")
            until(lambda: laptops[1].memory < idle + KEPT)
            assert session._cluster.recruits.called == []  # it is not called again by itself
            other = RunOptions(model, workers=workers[1:], cache=tmp_path / "m", context=64)
            with Session(other) as another:
                assert len(timed_answer(another, PROMPT, 1).tokens) == 1
            assert len(timed_answer(session, PROMPT, 3).tokens) == 3


@contextmanager
def serving(model: str, workers: Sequence[str], cache: Path) -> Iterator["subprocess.Popen[str]"]:
    """Run a master in a process of its own, which has answered nothing yet."""
    command = [*TPI, "serve", "-m", model, "--workers", ",".join(workers), "--port", "0", "-c", "64", "-q"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=clean(cache)) as process:
        try:
            assert process.stdout
            assert any(" is served at " in line for line in process.stdout)
            yield process
        finally:
            process.kill()
