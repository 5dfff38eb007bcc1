"""The tests' own way of starting TPI's programs (`tests.support.forking`)."""

import os
import subprocess
import sys


def test_a_forked_program_keeps_its_files_until_it_closes_them() -> None:
    command = [sys.executable, "-m", "tests.support.processes.open_files"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) == os.getpid()
