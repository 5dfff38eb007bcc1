"""Turns of the plain window and of records, timed by a clock of the test's own."""

import pytest

from worker.demand.records import turns
from worker.demand.records.turns import TURN, TURNS_EACH, TurnsJudge

WARM = 5  # most of a turn, so that it would tell


@pytest.mark.parametrize(("plain", "by_neurons"), [(1.0, 3.0), (3.0, 1.0)])
def test_what_takes_less_is_gone_on_with_and_what_warms_up_does_not_count(
    plain: float, by_neurons: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(turns, "perf_counter", lambda: now[0])
    monkeypatch.setattr(turns, "WARM", WARM)
    judge, taken = TurnsJudge(), list[bool]()
    for token in range(2 * TURNS_EACH * TURN + 5):
        judge.begin()
        taken.append(judge.predicts)
        now[0] += 1000.0  # changing over
        judge.start()
        seconds = by_neurons if judge.predicts else plain
        now[0] += 100.0 if token % TURN < WARM and token < 2 * TURNS_EACH * TURN else seconds
        judge.note(0.0, 1)
        now[0] += 50.0  # the master's part
    judge.begin()
    assert taken[: 2 * TURN] == [False] * TURN + [True] * TURN
    assert judge.pays is (by_neurons < plain)
    assert taken[-4:] == [by_neurons < plain] * 4
    said = f"a token takes {1e3 * plain:.1f} ms with all neurons and {1e3 * by_neurons:.1f} ms with those"
    assert said in judge.describe()


def test_prompts_and_steps_that_compute_nothing_are_no_turns() -> None:
    judge = TurnsJudge()
    for tokens in (9, 20, 4):
        judge.begin()
        judge.note(0.0, tokens)
    judge.begin()
    assert judge.token == 0
    assert not judge.predicts
