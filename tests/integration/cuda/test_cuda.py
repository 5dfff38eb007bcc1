"""CUDA and Triton in separate processes, which run the cases in `*_cases.py`.

Triton decides when it is imported whether it compiles or interprets, for the whole process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

HERE = Path(__file__).parent
NO_CARD = not Path("/proc/driver/nvidia/version").exists()
CASES = ("product", "attention", "device", "experts")
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux"),
    pytest.mark.timeout(1200),
]


def run_cases(*names: str, **environment: str) -> None:
    """Check that the cases of some files pass, in one process, for its imports take seconds.

    Compiled programs are kept, so that only changed ones are compiled again.
    """
    chosen = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *(f"{HERE}/{name}_cases.py" for name in names),
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**chosen, "TRITON_CACHE_DIR": str(ROOT / "build" / "triton"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]


def test_in_the_interpreter() -> None:
    run_cases(*CASES, TRITON_INTERPRET="1")


@pytest.mark.skipif(NO_CARD, reason="there is no NVIDIA card here")
def test_on_a_card() -> None:
    run_cases(*CASES, TPI_TEST_CARD="1")


def test_kernels_compile_for_cards() -> None:
    run_cases("compile")
