"""Eight streams of `tpi serve` at once, over workers that are killed, or frozen and woken, at moments drawn by seed."""

from pathlib import Path

import pytest

from benchmarks.trust.streams import measure

STRIKES = {"kill": 5, "freeze": 2}  # ten, with the kills of test_streams


@pytest.mark.timeout(240)
def test_eight_streams_over_the_api_lose_no_token_when_workers_are_struck(tmp_path: Path) -> None:
    """Seven of the faults of the benchmark: all streams are whole, and nothing is left of any of it."""
    struck = measure(tmp_path, STRIKES)
    assert struck.changed == []
    assert struck.left == []
    assert {kind: len(struck.found[kind].pauses) for kind in STRIKES} == STRIKES
