"""Faults of the network, in namespaces: a path is cut, or a link is slow and loses packets. Needs root on Linux."""

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from testbed.launch import Testbed
from tests.support.figures import assert_figures
from tests.support.models import TinyModel, make_model
from tests.support.stillness import Stillness
from tests.support.testbed_helpers import StderrLog, needs_root, wheel
from tpi.topology.topology import Host, HostLink, Topology, star

pytestmark = [needs_root, pytest.mark.waits, pytest.mark.timeout(400)]

TPI = [sys.executable, "-u", "-m", "tpi.cli"]
STAR, MESH = ("--collective", "star"), ("--collective", "mesh")
AGREED_S = 5.0
_TRIES = 3  # where the host is seen to stand still meanwhile


@contextmanager
def workers(bed: Testbed, root: Path) -> Iterator[tuple[str, dict[str, StderrLog]]]:
    """Run workers on b and c: their addresses, and the output of each."""

    def start(device: str) -> "subprocess.Popen[bytes]":
        command = [*TPI, "worker", "--listen", f"{bed.address(device)}:9990", "--no-announce", "--name", device]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "bufsize": 0}
        return bed.popen(device, command, env=os.environ | {"TPI_CACHE": str(root / device)}, **pipes)

    with ExitStack() as stack:
        heard = dict[str, StderrLog]()
        for device in ("b", "c"):
            process = stack.enter_context(start(device))
            heard[device] = stack.enter_context(StderrLog(process))
            stack.enter_context(killed(process))
            assert process.stdout
            assert b"listens on" in process.stdout.readline()
        yield f"{bed.address('b')}:9990,{bed.address('c')}:9990", heard


@contextmanager
def killed(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Kill the process at the end of the block."""
    try:
        yield
    finally:
        process.kill()


def run(
    bed: Testbed, root: Path, model: str, addresses: str, tokens: int, sums: Sequence[str] = STAR
) -> "subprocess.Popen[bytes]":
    command = [*TPI, "run", "-m", model, "-p", "Hello", "--raw", "--temp", "0", "--split", "equal", *sums]
    return bed.popen(
        "a", [*command, "--workers", addresses, "-n", str(tokens)], env=os.environ | {"TPI_CACHE": str(root / "a")},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
    )  # fmt: skip


@dataclass
class Agreed:
    """Seconds until the master continues with the others, all its output meanwhile, and all output of b."""

    seconds: float
    said: str
    said_by_b: str


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with two layers for each of three stages."""
    return str(make_model("llama", tmp_path_factory.mktemp("deep"), layers=6).directory)


class House:
    """Three devices that keep what they packed and were sent, and their answers when nothing was cut."""

    def __init__(self, caches: Path) -> None:
        self._caches = caches
        self._undisturbed: dict[tuple[str, ...], bytes] = {}  # by model and `sums`

    def struck(self, root: Path, model: str, cut: tuple[str, str], sums: Sequence[str]) -> Agreed:
        """Cut the path from one device to another while three answer, and check the answer.

        `sums` are options for the collective, and `root` is a folder for the network.
        """
        bed_of_three = Testbed.start(wheel(3, 1e9, 0.002), "tun", root=root / "bed")
        with bed_of_three as bed, workers(bed, self._caches) as (addresses, by):
            command = (bed, self._caches, model, addresses, 200, sums)
            if (asked := (model, *sums)) not in self._undisturbed:
                self._undisturbed[asked], said = run(*command).communicate(timeout=90)
                assert self._undisturbed[asked], said
            with run(*command) as process, StderrLog(process) as heard:
                assert process.stdout
                first, begun = process.stdout.read(1), time.monotonic()
                drop = ["ip", "route", "add", "blackhole", f"{bed.address(cut[1])}/32"]
                assert bed.popen(cut[0], drop).wait(30) == 0
                rest = process.stdout.read()
        assert process.returncode == 0, heard.text
        assert first + rest == self._undisturbed[asked]
        return Agreed(heard.after(begun, "going on with"), heard.text, by["b"].text)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    return House(tmp_path_factory.mktemp("caches"))


def agreed(row: str, once: Callable[[Path], Agreed], root: Path, *sentences: str) -> None:
    """Check that all continue within 5 s with messages like `sentences`.

    Other nodes may be lost only if the host stood still.
    """

    def tried(number: int) -> dict[str, float]:
        with Stillness() as host:
            found = once(root / f"try-{number}")
        as_it_is = all(sentence in found.said for sentence in sentences)
        assert as_it_is or host.excuses, (host.longest, found.said)
        return {"agreed": found.seconds if as_it_is else math.inf}

    assert_figures(row, {"agreed": AGREED_S}, tried)


@pytest.mark.parametrize("cut", [("b", "a"), ("a", "b")], ids=["from the worker", "to the worker"])
def test_one_way_drop(
    house: House, tmp_path: Path, tiny_model: Callable[[str], TinyModel], cut: tuple[str, str]
) -> None:
    """No packet gets through in one direction.

    The master leaves out that worker and no other. It cannot tell the worker, whose last line still says that it serves
    the master.
    """
    model = str(tiny_model("llama").directory)

    def once(root: Path) -> Agreed:
        found = house.struck(root, model, cut, STAR)
        assert " serving " in found.said_by_b.splitlines()[-1], found.said_by_b
        return found

    agreed("one-way drop", once, tmp_path, "worker b (", "with master, c\n")


@pytest.mark.parametrize("cut", [("b", "c"), ("c", "b")], ids=["one way", "the other"])
def test_one_way_drop_between_workers(
    house: House, tmp_path: Path, tiny_model: Callable[[str], TinyModel], cut: tuple[str, str]
) -> None:
    """The master hears both workers, which wait in a circle. It leaves out one of them, before any deadline."""
    model = str(tiny_model("llama").directory)
    circle = "both run, but nothing gets from one to the other"
    agreed("one-way drop between workers", lambda root: house.struck(root, model, cut, MESH), tmp_path, circle)


@pytest.mark.parametrize(
    "cut", [("a", "b"), ("b", "c"), ("c", "a"), ("c", "b")], ids=["first", "middle", "last", "back"]
)
def test_one_way_drop_between_stages(house: House, tmp_path: Path, deep_model: str, cut: tuple[str, str]) -> None:
    layout = ("--stages", "0-1:master,2-3:b,4-5:c")
    agreed("one-way drop", lambda root: house.struck(root, deep_model, cut, layout), tmp_path)


def test_slow_link(tmp_path: Path, tiny_model: Callable[[str], TinyModel]) -> None:
    """1 Mbit/s, 200 ms, and 5% of packets lost: the run takes long, but no worker is taken for lost."""
    model = str(tiny_model("llama").directory)
    topology = star("far", tuple(Host(name) for name in "abc"), HostLink(("", ""), 1e6, 0.1, loss=0.025))

    for number in range(_TRIES):
        with Stillness() as host:
            code, output, said = slowly(tmp_path / f"try-{number}", model, topology)
        if (code == 0 and "lost" not in said) or not host.excuses:
            break
    assert code == 0, said
    assert output
    assert "lost" not in said


def slowly(root: Path, model: str, topology: Topology) -> tuple[int, str, str]:
    """Return the exit code of a run on three far devices, its answer, and the master's output."""
    with Testbed.start(topology, "tun", root=root / "bed") as bed, workers(bed, root) as (addresses, _):
        process = run(bed, root, model, addresses, 8)
        output, said = process.communicate(timeout=110)
    return process.returncode, output.decode(), said.decode()
