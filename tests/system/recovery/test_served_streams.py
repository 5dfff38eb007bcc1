"""Eight streams of `tpi serve` at once, over workers that are killed, or frozen and woken, at moments drawn by seed."""

import re
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

STRIKES = {"kill": 5, "freeze": 2}  # ten, with the kills of test_streams


@pytest.mark.timeout(420)
def test_eight_api_streams_lose_no_token_when_workers_are_struck() -> None:
    """A shorter form of the benchmark. It fails if a stream is changed, or if anything is left behind."""
    command = [sys.executable, "-m", "benchmarks.trust.streams"]
    for kind, count in STRIKES.items():
        command += [f"--{kind}s", str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr + done.stdout
    for kind, count in STRIKES.items():
        assert len(re.findall(rf"^{kind} \d+: ", done.stderr, re.MULTILINE)) == count
        assert f"'fault': '{kind}', 'in an answer'" in done.stdout
        assert f"'fault': '{kind}', 'in an answer': 0" not in done.stdout
