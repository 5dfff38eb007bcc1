"""Stages: losing a node of any stage costs no token, and what a stage computes reaches no other node."""

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from master.deployment import deploy
from master.generation.speculation.pace import Gain, Pace
from master.options import RunOptions
from master.session import Session
from master.workers.remote import RemoteWorker
from tests.support.house import Laptop, house, timed_answer
from tests.support.models import make_model
from tpi.errors import NodeError, UsageError
from tpi.net.messages import NodeOptions

PROMPT, LENGTH = [5, 6, 7, 8], 30
LAYOUT = "0-1:master,2-3:a,4:b,5:c"
GROUPED = "0-2:master+c,3-5:a+b"
RING = "0:master,1:a,2:b,3:master,4-5:a"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    make_model("llama", directory, layers=6)
    return str(directory)


@contextmanager
def staged(
    tmp_path: Path,
    model: str,
    layout: str,
    prepare: Callable[[Sequence[Laptop]], object] = len,
    draft: str | None = None,
) -> Iterator[tuple[Session, dict[str, Laptop]]]:
    """Run a session over three laptops in this layout."""
    with house(tmp_path, 3) as laptops:
        prepare(laptops)
        addresses = tuple(each.address for each in laptops)
        options = RunOptions(model, workers=addresses, cache=tmp_path / "master", stages=layout, draft=draft)
        with Session(options) as session:
            yield session, {each.name: each for each in laptops}


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(
    ("layout", "victim"), [(LAYOUT, "a"), (LAYOUT, "b"), (LAYOUT, "c"), (GROUPED, "b"), (RING, "a")]
)
def test_a_node_lost_in_any_stage_costs_no_token(
    kind: signal.Signals, layout: str, victim: str, tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with staged(tmp_path, model, layout) as (session, laptops):
        said = list[str]()
        monkeypatch.setattr(deploy, "warn", said.append)
        wanted = timed_answer(session, PROMPT, LENGTH).tokens
        spoken = timed_answer(
            session, PROMPT, LENGTH, lambda count: laptops[victim].signal(kind) if count == 9 else None
        )
        assert spoken.tokens == wanted
        assert session.names == ("master", *sorted({"a", "b", "c"} - {victim}))
        assert any(f"names the node '{victim}'" in sentence for sentence in said)
        assert len(session.engine.deployment.stages) > 1


@pytest.mark.parametrize("ahead", [False, True])
def test_a_node_lost_while_a_model_drafts_costs_no_token(
    ahead: bool, tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pace, "runs_ahead", lambda *_: ahead)
    monkeypatch.setattr(Pace, "continues", lambda pace, plain, drafted, further, spent: len(drafted) < 3)
    monkeypatch.setattr(Pace, "rows", lambda pace, plain, chances: len(chances))
    monkeypatch.setattr(Gain, "off", property(lambda gain: False))
    with staged(tmp_path, model, LAYOUT, draft=model) as (session, laptops):
        session.engine.drafts = False
        wanted = timed_answer(session, PROMPT, LENGTH).tokens
        session.engine.drafts = True
        drafted = session.engine.speculation.drafted
        spoken = timed_answer(
            session, PROMPT, LENGTH, lambda count: laptops["b"].signal(signal.SIGKILL) if count == 9 else None
        )
        assert spoken.tokens == wanted
        assert session.names == ("master", "a", "c")
        before = drafted["model"]
        assert before > 0
        assert timed_answer(session, PROMPT, LENGTH).tokens == wanted
        assert drafted["model"] > before


def test_the_node_that_hangs_is_left_out_not_the_one_that_waits_for_it(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deploy, "NodeOptions", partial(NodeOptions, timeout_s=6.0))

    def hang(laptops: Sequence[Laptop]) -> None:
        laptops[0].stop()
        laptops[0].command = (sys.executable, "-m", "tests.support.processes.hanging_worker")
        laptops[0].start()

    with staged(tmp_path, model, LAYOUT, hang) as (session, laptops):
        gone, part = list[str](), session._cluster.part

        def noted(error: NodeError) -> list[RemoteWorker]:
            gone.append(error.node)
            return part(error)

        monkeypatch.setattr(session._cluster, "part", noted)
        wanted = timed_answer(session, PROMPT, LENGTH).tokens
        stop = laptops["a"].cache / "hang"
        assert (
            timed_answer(session, PROMPT, LENGTH, lambda count: stop.touch() if count == 9 else None).tokens == wanted
        )
        assert gone == ["a"]


def test_a_layout_with_an_unknown_node_is_refused(tmp_path: Path, model: str) -> None:
    refused = pytest.raises(UsageError, match="names the node 'd', but the nodes are master, a, b, c")
    with refused, staged(tmp_path, model, "0-2:master,3-5:d"):
        raise AssertionError


def test_nodes_outside_the_layout_hold_nothing_and_answers_are_the_same(tmp_path: Path, model: str) -> None:
    with staged(tmp_path, model, "0-2:a,3-5:c") as (session, _):
        wanted = timed_answer(session, PROMPT, LENGTH).tokens
        layers = [report.layers for report in session.report()]
        assert layers == [[], [[0, 3]], [], [[3, 6]]]
        assert session._cluster.workers[1].ready.weight_bytes == 0  # type: ignore[union-attr]
    with Session(RunOptions(model, workers=(), cache=tmp_path / "master")) as alone:
        assert timed_answer(alone, PROMPT, LENGTH).tokens == wanted


def test_layers_that_share_keys_stay_together_after_a_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a model can be cut in few places; the stages of the remaining nodes are cut there."""
    make_model("gemma4staged", tmp_path / "model")
    with staged(tmp_path, str(tmp_path / "model"), "0:a,1-5:master+b") as (session, laptops):
        said = list[str]()
        monkeypatch.setattr(deploy, "warn", said.append)
        wanted = timed_answer(session, PROMPT, LENGTH).tokens
        kill = laptops["a"].signal
        assert (
            timed_answer(session, PROMPT, LENGTH, lambda n: kill(signal.SIGKILL) if n == 9 else None).tokens == wanted
        )
        assert any("going on with 2 of 2 stages" in sentence for sentence in said)
        cuts = session.pack.config.stage_cuts
        assert all(stage.layers.first in cuts for stage in session.engine.deployment.stages)
