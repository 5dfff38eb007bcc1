"""Turns of the plain window and of records, on a clock that the test sets."""

import pytest

from worker.demand.records import turns
from worker.demand.records.turns import TURN, TURNS_EACH, TurnsJudge

WARM = 5  # most of a turn, so that it would tell


@pytest.mark.parametrize(("plain", "by_neurons"), [(1.0, 3.0), (3.0, 1.0)])
def test_the_faster_way_is_kept_and_warm_up_does_not_count(
    plain: float, by_neurons: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(turns, "perf_counter", lambda: now[0])
    monkeypatch.setattr(turns, "WARM", WARM)
    judge, taken = TurnsJudge(), list[bool]()
    for token in range(2 * TURNS_EACH * TURN + 5):
        judge.begin()
        taken.append(judge.by_neurons)
        now[0] += 1000.0  # changing over
        judge.start()
        seconds = by_neurons if judge.by_neurons else plain
        now[0] += 100.0 if token % TURN < WARM and token < 2 * TURNS_EACH * TURN else seconds
        judge.note(0.0, 1)
        now[0] += 50.0  # the master's part
    judge.begin()
    assert taken[: 2 * TURN] == [False] * TURN + [True] * TURN
    assert judge.predicting_is_faster() is (by_neurons < plain)
    assert taken[-4:] == [by_neurons < plain] * 4
    said = f"a token takes {1e3 * plain:.1f} ms with all neurons and {1e3 * by_neurons:.1f} ms with the predicted ones"
    assert said in judge.describe()


def test_prompts_and_steps_that_compute_nothing_are_no_turns() -> None:
    judge = TurnsJudge()
    for tokens in (9, 20, 400):
        judge.begin()
        judge.note(0.0, tokens)
    judge.begin()
    assert judge.token == 0
    assert not judge.by_neurons


def stepped(judge: TurnsJudge, now: list[float], tokens: int, plain: float, by_neurons: float, count: int) -> None:
    """Run a number of steps; each takes the time of its mode."""
    for _ in range(count):
        judge.begin()
        now[0] += by_neurons if judge.by_neurons else plain
        judge.note(0.0, tokens)


def test_parallel_streams_are_judged_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    now, all_turns = [0.0], 2 * TURNS_EACH * TURN
    monkeypatch.setattr(turns, "perf_counter", lambda: now[0])
    judge = TurnsJudge()
    stepped(judge, now, 1, 1.0, 3.0, all_turns + 1)
    assert judge.predicting_is_faster(1) is False
    stepped(judge, now, 4, 4.0, 2.0, TURN + all_turns + 1)
    assert judge.predicting_is_faster(4) is True
    assert judge.by_neurons
    stepped(judge, now, 1, 1.0, 3.0, TURN)
    assert not judge.by_neurons  # what was found out is remembered
    said = judge.describe()
    assert "a token takes 1000.0 ms with all neurons and 3000.0 ms" in said
    assert "a step of 3 to 4 tokens takes 4000.0 ms with all neurons and 2000.0 ms" in said


def test_a_request_between_streams_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(turns, "perf_counter", lambda: now[0])
    judge = TurnsJudge()
    for _ in range(2 * TURNS_EACH * TURN):
        stepped(judge, now, 2, 4.0, 2.0, 2)
        stepped(judge, now, 1, 1.0, 1.0, 1)
    assert judge.predicting_is_faster(2) is True
    assert judge.by_neurons
