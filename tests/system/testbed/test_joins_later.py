"""Workers that join a master later: who helps is used, who is far is not, until its link is mended. Root on Linux."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from testbed.faults import inflict
from testbed.launch import Testbed
from tests.support.cluster.key_helpers import pair_folders
from tests.support.models import SIZES, write_tokenizer
from tests.support.testbed_helpers import needs_root, started, until
from tpi.keys.identity import load_identity
from tpi.topology.topology import Host, HostLink, star

pytestmark = [needs_root, pytest.mark.waits, pytest.mark.timeout(300)]

NAMES = ("a", "b", "c")
LONG_S = 100.0
LARGE = SIZES | {"hidden_size": 512, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 4,
                 "intermediate_size": 16384}  # fmt: skip


class Home:
    """A master on a slow device, a, that answers when it is asked to; workers on the others, once they are started."""

    def __init__(self, root: Path, bed: Testbed, stack: ExitStack) -> None:
        self._root, self._bed, self._stack = root, bed, stack
        self._keys = {name: root / "keys" / name for name in NAMES}
        pair_folders(*self._keys.values())
        (root / "announced").touch()

    def _environment(self, name: str) -> dict[str, str]:
        return os.environ | {"TPI_CACHE": str(self._root / name), "TPI_CONFIG": str(self._keys[name])}

    def begin(self, model: Path) -> None:
        """Start the master."""
        log = self._stack.enter_context((self._root / "log").open("wb"))
        program = [sys.executable, "-m", "tests.support.processes.finding_master", str(model)]
        self._master = self._bed.popen(
            "a", [*program, str(self._root / "announced")], env=self._environment("a"), text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip
        self._stack.enter_context(started(self._stack.enter_context(self._master)))

    def joins(self, name: str) -> None:
        """Start a worker, and have it announced."""
        address = self._bed.address(name)
        command = [sys.executable, "-m", "tpi.cli", "worker", "--listen", f"{address}:9990", "--name", name]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        process = self._bed.popen(name, [*command, "--no-announce"], env=self._environment(name), **pipes)
        self._stack.enter_context(started(self._stack.enter_context(process)))
        assert process.stdout
        assert "listens on" in process.stdout.readline()
        with (self._root / "announced").open("a") as said:
            said.write(f"{name} {load_identity(self._keys[name]).public.hex()} {address}\n")

    def answer(self) -> list[str]:
        """Have a request answered; the names of the nodes that did."""
        assert self._master.stdin
        assert self._master.stdout
        self._master.stdin.write("\n")
        names: list[str] = self._master.stdout.readline().split()
        assert names, self.said
        return names

    @property
    def said(self) -> str:
        return (self._root / "log").read_text()


@contextmanager
def home(root: Path) -> Iterator[tuple[Home, Testbed]]:
    devices = (Host("a", cpu=0.3), Host("b"), Host("c"))
    topology = star("later", devices, HostLink(("", ""), 1e9, 50e-6))
    with Testbed.start(topology, "tun", root=root / "bed") as bed, ExitStack() as stack:
        yield Home(root, bed, stack), bed


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer of 100 MB, over which a slow device takes longer than two sums over a cable."""
    import torch
    import transformers

    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("large")
    transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**LARGE)).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def test_who_joins_later_is_used_if_that_is_faster(large_model: Path, tmp_path: Path) -> None:
    with home(tmp_path) as (place, bed):
        place.begin(large_model)
        assert place.answer() == ["master"]
        place.joins("b")
        until(lambda: place.answer() == ["master", "b"], LONG_S)
        inflict(bed.folder, "slow", "c", latency=0.1)
        place.joins("c")
        until(lambda: place.answer() == ["master", "b"] and "c is not used" in place.said, LONG_S)
        inflict(bed.folder, "heal", "c")
        until(lambda: place.answer() == ["master", "b", "c"], LONG_S)
        inflict(bed.folder, "kill", "b")
        until(lambda: place.answer() == ["master", "c"], LONG_S)
        place.joins("b")
        until(lambda: place.answer() == ["master", "b", "c"], LONG_S)  # in its place
    (said,) = (line for line in place.said.splitlines() if "c is not used" in line)
    assert re.search(r": [^ ]+ tok/s expected without it, [^ ]+ with it \([^ ]+ ms and [^ ]+ Mbit/s away\); ", said)
    assert "Traceback" not in place.said
