"""`tpi bench` and its nodes: figures cover all repeats, and nothing between them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from master.commands import bench
from master.reporting.figures import RunFigures
from scheduler.model.timeline import OtherWaits
from tests.support.models import TinyModel
from tpi.net.questions import Stats

PROMPT, GENERATED, REPEATS = 16, 8, 3
DECODED = GENERATED - 1  # the first token comes of the prompt


def slower_and_slower(tokens: int) -> float:
    """Return the seconds that a node of this test has computed after a number of tokens."""
    return tokens**2 / 1000


def test_node_figures_of_a_bench_are_over_all_repeats(
    tiny_model: Callable[[str], TinyModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = RunFigures.stats

    def skewed(figures: RunFigures, waits: Sequence[OtherWaits] = ()) -> list[Stats]:
        return [replace(node, compute_s=slower_and_slower(node.tokens)) for node in stats(figures, waits)]

    monkeypatch.setattr(RunFigures, "stats", skewed)
    monkeypatch.setenv("TPI_CACHE", str(tmp_path))
    sizes = ("--prompt-tokens", str(PROMPT), "--gen-tokens", str(GENERATED), "--repeat", str(REPEATS))
    done = CliRunner().invoke(bench, ["-m", str(tiny_model("llama").directory), *sizes, "--json"])
    assert done.exit_code == 0, done.output
    (node,) = json.loads(done.stdout.splitlines()[-1])["nodes"]
    warm_up = PROMPT + 1
    ends = [warm_up + repeat * (PROMPT + DECODED) for repeat in range(1, REPEATS + 1)]
    seconds = sum(slower_and_slower(end) - slower_and_slower(end - DECODED) for end in ends)
    assert node["compute_ms_per_token"] == pytest.approx(1000 * seconds / (REPEATS * DECODED))
