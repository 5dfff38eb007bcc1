"""What a network does to a cluster, in namespaces: a way is cut, a link is slow and loses. Needs root on Linux."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from testbed.launch import Testbed
from tests.support.models import TinyModel
from tests.support.testbed_helpers import needs_root, started, wheel
from tpi.topology.topology import Host, HostLink, star

pytestmark = [needs_root, pytest.mark.alone]

TPI = [sys.executable, "-u", "-m", "tpi.cli"]
_FIRST = -10  # about ten times the weight of others


@pytest.fixture(autouse=True)
def before_others() -> Iterator[None]:
    """The devices come first on a busy host: one that gets no core for seconds is silent, as if it were cut off."""
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, min(mine, _FIRST))
    yield
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, mine)


@contextmanager
def workers(bed: Testbed, root: Path) -> Iterator[str]:
    """Workers on b and c; their addresses."""

    def start(device: str) -> "subprocess.Popen[str]":
        command = [*TPI, "worker", "--listen", f"{bed.address(device)}:9990", "--no-announce", "--name", device]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        return bed.popen(device, command, env=os.environ | {"TPI_CACHE": str(root / device)}, **pipes)

    with started(start("b")) as b, started(start("c")) as c:
        assert b.stdout
        assert c.stdout
        with b.stdout, c.stdout:
            assert "listens on" in b.stdout.readline()
            assert "listens on" in c.stdout.readline()
            yield f"{bed.address('b')}:9990,{bed.address('c')}:9990"


def run(
    bed: Testbed, root: Path, model: str, addresses: str, tokens: int, collective: str = "star"
) -> "subprocess.Popen[bytes]":
    command = [*TPI, "run", "-m", model, "-p", "Hello", "--raw", "--temp", "0", "--split", "equal",
               "--collective", collective]  # fmt: skip
    return bed.popen(
        "a", [*command, "--workers", addresses, "-n", str(tokens)], env=os.environ | {"TPI_CACHE": str(root / "a")},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
    )  # fmt: skip


@pytest.mark.parametrize("way", ["from the worker", "to the worker"])
def test_one_way_drop(tmp_path: Path, tiny_model: Callable[[str], TinyModel], way: str) -> None:
    """Nothing gets through one way, everything the other: the worker is left out, and the answer is the same."""
    model = str(tiny_model("llama").directory)
    with Testbed.start(wheel(3, 1e9, 0.002), "tun", root=tmp_path / "bed") as bed, workers(bed, tmp_path) as addresses:
        wanted, _ = run(bed, tmp_path, model, addresses, 200).communicate(timeout=90)
        with run(bed, tmp_path, model, addresses, 200) as process:
            assert process.stdout
            first = process.stdout.read(1)
            source, target = ("b", "a") if way == "from the worker" else ("a", "b")
            drop = ["ip", "route", "add", "blackhole", f"{bed.address(target)}/32"]
            assert bed.popen(source, drop).wait(30) == 0
            rest, said = process.communicate(timeout=100)
    assert process.returncode == 0, said
    assert first + rest == wanted
    assert b"worker b (" in said
    assert b"going on with master, c" in said


@pytest.mark.parametrize("cut", [("b", "c"), ("c", "b")], ids=["one way", "the other"])
def test_one_way_drop_between_workers(
    tmp_path: Path, tiny_model: Callable[[str], TinyModel], cut: tuple[str, str]
) -> None:
    """Both are heard by the master, and wait in a circle: one of them is left out, by that and not by a deadline."""
    model = str(tiny_model("llama").directory)
    with Testbed.start(wheel(3, 1e9, 0.002), "tun", root=tmp_path / "bed") as bed, workers(bed, tmp_path) as addresses:
        wanted, _ = run(bed, tmp_path, model, addresses, 200, "mesh").communicate(timeout=90)
        with run(bed, tmp_path, model, addresses, 200, "mesh") as process:
            assert process.stdout
            first = process.stdout.read(1)
            drop = ["ip", "route", "add", "blackhole", f"{bed.address(cut[1])}/32"]
            assert bed.popen(cut[0], drop).wait(30) == 0
            rest, said = process.communicate(timeout=100)
    assert process.returncode == 0, said
    assert first + rest == wanted
    assert b"both run, but nothing gets from one to the other" in said
    assert b"going on with master" in said


def test_slow_link(tmp_path: Path, tiny_model: Callable[[str], TinyModel]) -> None:
    """1 Mbit/s, 200 ms, and a packet in 20 lost on the way: that takes long, and nobody is taken for lost."""
    model = str(tiny_model("llama").directory)
    topology = star("far", tuple(Host(name) for name in "abc"), HostLink(("", ""), 1e6, 0.1, loss=0.025))
    with Testbed.start(topology, "tun", root=tmp_path / "bed") as bed, workers(bed, tmp_path) as addresses:
        output, said = run(bed, tmp_path, model, addresses, 8).communicate(timeout=110)
    assert b"lost" not in said
    assert output
