"""Four laptops on one Wi-Fi router answer a prompt, and lose one of them. Needs root on Linux."""

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from testbed import state
from tests.support.figures import assert_figures
from tests.support.models import TinyModel
from tests.support.stillness import Stillness
from tests.support.testbed_helpers import TPI, StderrLog, needs_root, traces

pytestmark = pytest.mark.waits

AGREED_S = 5.0
LAPTOPS = ("master", "mac-air", "dell1", "dell2")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def start(directory: Path, cache: Path, tokens: int) -> "subprocess.Popen[bytes]":
    """Start `tpi run` on the first of four laptops; its first line is the testbed's id."""
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
        output, said = run.communicate(timeout=100)
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


def cut_off(directory: Path, cache: Path, wanted: bytes) -> tuple[float, str]:
    """Cut a laptop off while four answer. Return the seconds until the master continues, and its first sentence.

    The answer must not change.
    """
    with start(directory, cache, tokens=240) as run, StderrLog(run) as heard:
        assert run.stdout is not None
        name = run.stdout.readline().decode().strip()
        first, begun = run.stdout.read(1), time.monotonic()  # the answer has begun
        subprocess.run([*TPI, "fault", "--id", name, "cut", "dell1"], check=True, stdout=subprocess.DEVNULL)
        rest = run.stdout.read()
    assert run.wait() == 0, heard.text
    assert first + rest == wanted
    assert "Traceback" not in heard.text
    assert traces(state.default_root(), name) == []
    warnings = [line for line in heard.text.splitlines() if line.startswith("tpi: ")]
    assert warnings, f"nobody was missed: {heard.text}"
    return heard.after(begun, "going on with"), warnings[0]


@needs_root
@pytest.mark.timeout(600)
def test_partition(cache: Path, tiny_model: Callable[[str], TinyModel]) -> None:
    """A laptop that is cut off is left out within 5 s, and no other laptop unless the host stood still."""
    directory = tiny_model("llama").directory
    with start(directory, cache, tokens=240) as run:
        wanted, _ = run.communicate(timeout=100)

    def once(number: int) -> dict[str, float]:
        with Stillness() as host:
            seconds, said = cut_off(directory, cache, wanted.partition(b"\n")[2])
        alone = "dell1" in said and "is lost" in said and said.endswith("going on with master, mac-air, dell2")
        assert alone or host.excuses or number < 2, (host.longest, said)
        return {"agreed": seconds if alone else math.inf}

    assert_figures("partition", {"agreed": AGREED_S}, once)
