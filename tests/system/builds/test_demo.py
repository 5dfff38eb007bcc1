"""`make demo`, with which the README begins, in the environment of these tests; and what the pages require."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from master.generation.answer import AnswerLimits
from master.options import RunOptions
from master.session import Session
from master.vocabulary.sampler import Sampler, Sampling
from tests.support.generating import answer_in
from tests.support.paths import ROOT
from tpi.config import default_cache

VENV = Path(sys.executable).parent.parent  # not resolved: its Python is a link to the system's


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.skipif(not (VENV / "bin" / "tpi").exists(), reason="tpi is not installed beside this Python")
@pytest.mark.timeout(300)
def test_the_demo_says_paris() -> None:
    """The set-up of the environment is skipped."""
    installed = VENV / ".installed"
    command = ["make", f"--old-file={installed}", "demo", f"VENV={VENV}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    answer = done.stdout.split("--local 2", 1)[1]  # behind the command, which make prints too
    assert "Paris" in answer


KNOWN = {"List the seven days of the week.": "7. Sunday", "How many days are in a week?": "7 days"}
"""Prompts that the pages show for the demo model, and what a right answer says."""


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_the_demo_model_answers_what_the_pages_ask(nodes: int) -> None:
    pages = "".join((ROOT / name).read_text() for name in ("README.md", "docs/testbed.md"))
    asked = re.findall(r"smollm2-135m [^\n]*-p \"([^\"]+)\"", pages)
    assert set(asked) == KNOWN.keys()
    with Session(RunOptions("smollm2-135m", local=nodes - 1, cache=default_cache())) as session:
        for prompt, right in KNOWN.items():
            tokens = session.tokenizer.encode_chat([{"role": "user", "content": prompt}])
            assert right in answer_in(session, tokens, Sampler(Sampling(temperature=0)), AnswerLimits(60)).text
