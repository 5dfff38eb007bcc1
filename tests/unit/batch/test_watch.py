"""Log lines with the progress of a batch and the time left, on a clock that the test sets."""

from master.batch.watch import BatchLines, duration


def test_a_line_now_and_then_with_the_time_left() -> None:
    said: list[str] = []
    now = [100.0]
    lines = BatchLines(said.append, lambda: now[0])
    lines(10, 110)
    for _ in range(20):
        now[0] += 3.0
        lines(10 + int((now[0] - 100) / 3), 110)
    assert said == [
        "10 of 110 are answered already",
        "20 of 110 answered, 20 a minute, about 4 min left",
        "30 of 110 answered, 20 a minute, about 4 min left",
    ]


def test_durations_for_people() -> None:
    assert [duration(seconds) for seconds in (5, 89.6, 600, 7200)] == ["5 s", "90 s", "10 min", "2.0 h"]
