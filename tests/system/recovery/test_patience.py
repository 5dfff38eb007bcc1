"""Slow links with losses and a busy worker: no worker is taken for lost. Needs root on Linux."""

import json
import subprocess
import sys

import pytest

from tests.support.paths import ROOT
from tests.support.testbed_helpers import needs_root

REQUESTS, EVERY_S = 3, 20


@needs_root
@pytest.mark.waits
@pytest.mark.timeout(660)
def test_slow_links_evict_no_worker() -> None:
    """A shorter form of the benchmark, which takes an hour. It mostly waits, so other tests run at the same time."""
    command = [sys.executable, "-m", "benchmarks.trust.patience"]
    command += ["--minutes", str(REQUESTS * EVERY_S / 60), "--every", str(EVERY_S)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr + done.stdout
    (table,) = json.loads(done.stdout)["tables"]
    (row,) = table["rows"]
    assert row["requests"] == REQUESTS
    assert row["failed or changed"] == 0
    assert row["workers reported as lost"] == 0
