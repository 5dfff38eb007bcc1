"""A run during a flood of messages from strangers keeps its speed and its memory. Needs root on Linux."""

import json
import subprocess
import sys
from statistics import median

import pytest

from tests.support.paths import ROOT
from tests.support.testbed_helpers import needs_root

pytestmark = [needs_root, pytest.mark.waits, pytest.mark.timeout(400)]

LEAST, MOST_BYTES = 0.9, 16 << 20
ROUNDS, TRIES = 3, 3  # the benchmark has 15 rounds, on a machine that does nothing else


def test_a_thousand_strangers_cost_under_a_tenth_of_the_speed() -> None:
    """Neighbouring rounds are compared, and the best try counts, because other programs may use this machine."""
    command = [sys.executable, "-m", "benchmarks.trust.strangers", "--rounds", str(ROUNDS)]
    best = 0.0
    for _ in range(TRIES):
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, timeout=120, check=True)
        ratios, grown = json.loads(done.stdout.splitlines()[-1])
        assert grown < MOST_BYTES
        best = max(best, median(ratios))
        if best > LEAST:
            break
    assert best > LEAST
