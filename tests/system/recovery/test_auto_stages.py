"""Stages that the planner chooses by speeds and links, and again for the workers that remain or have joined."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from master.joining import planned, split
from master.options import RunOptions
from master.planning.home.asked import Neighbour, home_of_neighbours
from master.planning.home.members import Home
from master.session import Session
from master.workers import survey
from master.workers.survey import WorkerLinks
from scheduler.model.machine import NodeMachine
from tests.support.house import Laptop, house, timed_answer, until
from tests.support.models import make_model
from tpi.topology.links import Link, LinkTable

PROMPT, LENGTH = [5, 6, 7, 8], 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    make_model("llama", directory, layers=6)
    return str(directory)


@contextmanager
def far_apart(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, latency: float = 0.02, **options: Any
) -> Iterator[tuple[Session, dict[str, Laptop]]]:
    """A session over two laptops, both of which are used, planned as if each link took `latency` seconds."""

    def home(own: NodeMachine, neighbours: Sequence[Neighbour], links: WorkerLinks) -> Home:
        found = home_of_neighbours(own, neighbours, links)
        return replace(found, links=LinkTable.uniform(len(found.names), Link(latency, 1e8)))

    monkeypatch.setattr(planned, "leaves_machine", lambda host: True)
    monkeypatch.setattr(split, "home_of_neighbours", home)
    with house(tmp_path, 2) as laptops:
        addresses = tuple(each.address for each in laptops)
        asked = RunOptions(model, workers=addresses, keep_workers=True, cache=tmp_path / "master", **options)
        with Session(asked) as session:
            yield session, {each.name: each for each in laptops}


def members(session: Session) -> list[tuple[int, ...]]:
    return [stage.ranks for stage in session.engine.deployment.stages]


def test_far_workers_get_stages_again_after_a_loss_and_a_return(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Session(RunOptions(model, cache=tmp_path / "master")) as alone:
        wanted = timed_answer(alone, PROMPT, LENGTH).tokens
    with far_apart(tmp_path, model, monkeypatch) as (session, laptops):
        assert {1, 2} <= {rank for ranks in members(session) for rank in ranks}
        assert len(members(session)) > 1
        compared = session.compared()
        assert compared is not None
        assert [stage.split.members for stage in compared.use.stages] == members(session)
        assert timed_answer(session, PROMPT, LENGTH).tokens == wanted
        kill = laptops["a"].signal
        assert (
            timed_answer(session, PROMPT, LENGTH, lambda n: kill(signal.SIGKILL) if n == 9 else None).tokens == wanted
        )
        assert {rank for ranks in members(session) for rank in ranks} - {0} == {1}
        laptops["a"].start()
        until(lambda: bool(session._cluster.recruits.ready))
        assert timed_answer(session, PROMPT, LENGTH).tokens == wanted
        assert {1, 2} <= {rank for ranks in members(session) for rank in ranks}


@pytest.mark.parametrize("options", [{"stages": "1"}, {"split": "equal"}])
def test_one_stage_stays_where_it_is_asked_for(
    options: dict[str, Any], tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with far_apart(tmp_path, model, monkeypatch, **options) as (session, _):
        assert members(session) == [(0, 1, 2)]
        assert session.compared() is None
        assert len(timed_answer(session, PROMPT, LENGTH).tokens) == LENGTH


def test_the_plan_is_doubted_at_the_end_of_a_run_that_contradicts_it(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The links between these workers take far less than the planned 500 ms."""
    monkeypatch.setattr(survey, "leaves_machine", lambda host: True)
    with far_apart(tmp_path, model, monkeypatch, latency=0.5, links_cache=tmp_path / "links.json") as (session, _):
        session.engine.drafts = False
        for _ in range(2):
            timed_answer(session, PROMPT, LENGTH)
        assert "measured again" not in capsys.readouterr().err
    assert "the links between the nodes are measured again before the next plan" in capsys.readouterr().err
