"""A home's worth: four laptops on one Wi-Fi router answer a prompt, and lose one of them. Needs root on Linux."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.home import paper_homes, specified_links, wheel
from benchmarks.home_network import Measured, ratio
from benchmarks.home_prefill import HIDDEN, LAYERS, PROMPT, floor, slowest_compute
from testbed import state
from testbed.schema import load_topology
from tests.support.models import TinyModel
from tests.support.testbed_helpers import TPI, needs_root, traces

LAPTOPS = ("master", "mac-air", "dell1", "dell2")
A_FEW_SECONDS = 15.0  # on a machine that does other things as well


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def start(directory: Path, cache: Path, tokens: int) -> "subprocess.Popen[bytes]":
    """`tpi run` on the first of four laptops; it says the testbed's id first."""
    run = [sys.executable, "-m", "tpi.cli", "run", "-m", str(directory), "-p", "Hello", "--raw", "--temp", "0"]
    script = ["sh", "-c", 'echo "$TPI_TESTBED"; exec "$@"', "sh", *run, "-n", str(tokens), "-t", "1"]
    return subprocess.Popen(
        [*TPI, "run", "--no-verify", "paper-4-laptops", "--", *script],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, env=os.environ | {"TPI_CACHE": str(cache)},
    )  # fmt: skip


@needs_root
def test_four_laptops_answer_with_a_table_of_nodes(cache: Path, tiny_model: Callable[[str], TinyModel]) -> None:
    with start(tiny_model("llama").directory, cache, tokens=3) as run:
        output, said = run.communicate(timeout=60)
    assert run.returncode == 0, said.decode()
    name, *lines = output.decode().splitlines()
    for laptop in LAPTOPS:
        assert sum(line.split()[:1] == [laptop] for line in lines) == 1, lines
    assert "3 tokens at" in lines[-1]
    assert "4 nodes, f32" in lines[-1]
    assert traces(state.default_root(), name) == []


@needs_root
def test_a_laptop_that_goes_ends_it_in_one_sentence(cache: Path, tiny_model: Callable[[str], TinyModel]) -> None:
    with start(tiny_model("llama").directory, cache, tokens=240) as run:
        assert run.stdout is not None
        name = run.stdout.readline().decode().strip()
        assert run.stdout.read(1)  # the answer has begun
        subprocess.run([*TPI, "fault", "--id", name, "cut", "dell1"], check=True, stdout=subprocess.DEVNULL)
        cut = time.monotonic()
        _, said = run.communicate(timeout=60)
    assert time.monotonic() - cut < A_FEW_SECONDS
    assert run.returncode == 1
    sentences = [line for line in said.decode().splitlines() if line.startswith("tpi: ")]
    assert len(sentences) == 1, said.decode()
    assert "dell1" in sentences[0]
    assert "lost" in sentences[0]
    assert "Traceback" not in said.decode()
    assert traces(state.default_root(), name) == []


def test_homes_have_the_latency_and_bandwidth_asked_for() -> None:
    homes = paper_homes(0.010, 1e9)
    assert homes.latency("device1", "device8") == pytest.approx(0.010)
    assert homes.bandwidth("device1", "device8") == 1e9
    links = specified_links(wheel(3, 0.002, 8e6))
    assert links.between(0, 2).latency_s == pytest.approx(0.002)
    assert links.between(1, 2).bytes_per_s == 1e6


def test_the_floor_of_a_prompt_is_its_bytes_and_latencies() -> None:
    """Over fast links 60 latencies and one for the embeddings; over slow ones what a two-shot carries, and they."""
    far, slow = wheel(4, 0.010, 1e15), wheel(4, 0.0, 8e6)
    assert floor(far) == pytest.approx((2 * LAYERS + 1) * 0.010, rel=1e-3)
    two_shot = 2 * 3 / 4 * 2 * PROMPT * HIDDEN
    assert floor(slow) == pytest.approx((2 * LAYERS * two_shot + 3 * 4 * PROMPT * HIDDEN) / 1e6)
    assert floor(load_topology("lan-10ms-100mb")) > floor(load_topology("lan-10ms-1gb"))


def test_compute_is_that_of_the_slowest_device_in_every_block_of_one_step() -> None:
    def spans(pid: int, *durations: float) -> list[dict[str, Any]]:
        """One lane, but in the middle of three steps two, which share its duration."""
        return [
            {"cat": "compute", "pid": pid, "dur": each / lanes, "name": f"block {block}"}
            for lanes, each in zip((1, 2, 1), durations, strict=True)
            for block in range(2 * LAYERS)
            for _ in range(lanes)
        ]

    events: list[dict[str, Any]] = [
        *spans(0, 9.0, 1.0, 7.0),
        {"cat": "allreduce", "pid": 0, "dur": 99.0},
        {"ph": "M"},
        *spans(1, 9.0, 2.0, 7.0),
    ]
    assert slowest_compute(events, before_last=1) == pytest.approx(2 * LAYERS * 2e-6)


def test_a_ratio_compares_quickest_turns() -> None:
    base = Measured(decode=100.0, sync=90.0, prefill=500.0, predicted=None, chosen=("star", "star"))
    runs = {
        "star": [base, replace(base, decode=120.0)],
        "mesh": [replace(base, decode=50.0), replace(base, decode=60.0)],
        "auto": [replace(base, decode=70.0), replace(base, decode=51.0)],
    }
    assert ratio(runs, "auto", ["star", "mesh"], "decode") == pytest.approx(1.02)
