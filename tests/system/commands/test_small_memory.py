"""Runs in a control group with little memory, as in a small container: they choose a plan that fits, or name one."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from testbed.cgroups import find_hierarchies, make_group, remove_groups
from tests.support.commands import TPI, clean
from tpi.config import default_cache
from tpi.errors import TestbedError
from tpi.topology.topology import Host

_MIB = 1 << 20
_JOIN = 'for group in $0; do echo $$ > "$group/cgroup.procs" || exit 99; done; exec "$@"'

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@contextmanager
def control_group(memory: int) -> Iterator[tuple[str, ...]]:
    """Make the directories of a control group with a number of bytes; remove them at the end."""
    name = f"tpi-test-{os.getpid()}"
    try:
        folders = make_group(find_hierarchies(), name, Host("small", memory=memory), [])
    except (OSError, TestbedError) as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        yield folders
    finally:
        assert remove_groups((*folders, *(str(Path(folder).parent) for folder in folders))) == []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run the demo model in a control group; the first run also packs it."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to make control groups")
    cache = tmp_path_factory.mktemp("cache")
    (cache / "models").symlink_to(default_cache() / "models")
    told = ["run", "-m", "smollm2-135m", "-p", "hi", "-n", "2"]

    def run(memory: int, *arguments: str) -> "subprocess.CompletedProcess[str]":
        with control_group(memory) as folders:
            command = ["sh", "-c", _JOIN, " ".join(folders), *TPI, *told, *arguments]
            return subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=200,
                check=False,
                env=clean(cache),
                stdin=subprocess.DEVNULL,
            )

    return run


@pytest.mark.parametrize(("mib", "local", "shorter"), [(150, 0, True), (160, 1, True), (256, 2, True), (384, 1, False)])
def test_what_is_free_is_shared_out_so_that_the_run_works(run: Run, mib: int, local: int, shorter: bool) -> None:
    done = run(mib * _MIB, "--local", str(local)) if local else run(mib * _MIB)
    assert done.returncode == 0, done.stderr
    assert ("tokens, as many as fit into memory; give a larger -c to require more" in done.stderr) is shorter


def test_what_fits_in_no_way_is_refused_with_ways_that_work(run: Run) -> None:
    done = run(150 * _MIB, "--local", "3")
    assert done.returncode == 2
    assert "of memory are free for each of the 4 nodes on this machine, too little for the model; leave" in done.stderr
    done = run(130 * _MIB, "-c", "4096")
    assert done.returncode == 2
    shorter = done.stderr.split("too little for a context of 4096 tokens; give -c ")[1].split(",")[0]
    done = run(130 * _MIB, "-c", shorter)
    assert done.returncode == 0, done.stderr
