"""A home's worth: four laptops on one Wi-Fi router answer a prompt, and lose one of them. Needs root on Linux."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from testbed import state
from tests.support.models import TinyModel
from tests.support.testbed_helpers import TPI, needs_root, traces

pytestmark = pytest.mark.alone

LAPTOPS = ("master", "mac-air", "dell1", "dell2")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def start(directory: Path, cache: Path, tokens: int) -> "subprocess.Popen[bytes]":
    """`tpi run` on the first of four laptops; it says the testbed's id first."""
    model = ["-m", str(directory), "--split", "equal"]
    run = [sys.executable, "-m", "tpi.cli", "run", *model, "-p", "Hello", "--raw", "--temp", "0"]
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
    name, *answer = output.decode().splitlines()
    lines = said.decode().splitlines()
    assert answer
    for laptop in LAPTOPS:
        assert sum(line.split()[:1] == [laptop] for line in lines) == 1, lines
    summary = " ".join(lines)
    assert "3 tokens at" in summary
    assert "4 nodes, f32" in summary
    assert traces(state.default_root(), name) == []


@needs_root
def test_partition(cache: Path, tiny_model: Callable[[str], TinyModel]) -> None:
    """A laptop that is cut off is left out, and the answer is what it would have been."""
    with start(tiny_model("llama").directory, cache, tokens=240) as run:
        wanted, _ = run.communicate(timeout=60)
    with start(tiny_model("llama").directory, cache, tokens=240) as run:
        assert run.stdout is not None
        name = run.stdout.readline().decode().strip()
        first = run.stdout.read(1)  # the answer has begun
        subprocess.run([*TPI, "fault", "--id", name, "cut", "dell1"], check=True, stdout=subprocess.DEVNULL)
        rest, said = run.communicate(timeout=100)
    assert run.returncode == 0, said.decode()
    assert first + rest == wanted.partition(b"\n")[2]
    sentences = [line for line in said.decode().splitlines() if line.startswith("tpi: ")]
    assert "dell1" in sentences[0]
    assert "is lost" in sentences[0]
    assert sentences[0].endswith("going on with master, mac-air, dell2")
    assert "Traceback" not in said.decode()
    assert traces(state.default_root(), name) == []
