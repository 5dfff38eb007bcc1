"""A worker is killed while the layer for multi-token prediction drafts: the answer is the same, and drafts go on."""

import signal
from pathlib import Path

import pytest

from master.generation.speculation import speculation
from master.generation.speculation.pace import Gain, Pace
from master.options import RunOptions
from master.session import Session
from tests.support.house import house, timed_answer
from tests.support.weights.mtp import make_mtp

PROMPT = [5, 6, 7, 8]
LENGTH = 40


def test_a_killed_worker_changes_no_drafted_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "drafts", property(lambda pace: True))
    monkeypatch.setattr(Pace, "rows", lambda pace, plain, chances: len(chances))
    monkeypatch.setattr(Pace, "continues", lambda pace, plain, drafted, further, spent: len(drafted) < 3)
    monkeypatch.setattr(Gain, "off", property(lambda gain: False))
    monkeypatch.setattr(speculation, "look_up", lambda tokens, earlier, most: ([], 0))
    model = str(make_mtp("glm4moe", tmp_path / "model", right=True).directory)
    with house(tmp_path, 2) as laptops:
        workers = tuple(one.address for one in laptops)
        with Session(
            RunOptions(model, workers=workers, stages="1", keep_workers=True, cache=tmp_path / "m")
        ) as session:
            session.engine.drafts = False
            wanted = timed_answer(session, PROMPT, LENGTH).tokens
            session.engine.drafts = True
            before = 0

            def at(count: int) -> None:
                nonlocal before
                if count == 15:
                    before = session.engine.speculation.accepted["mtp"]
                    laptops[1].signal(signal.SIGKILL)

            assert timed_answer(session, PROMPT, LENGTH, at).tokens == wanted
            assert before > 0
            assert session.engine.speculation.accepted["mtp"] > before
            assert len(session.names) == 2
