"""Figures and names in messages: no exponents, no address twice, heads and neurons rather than units."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from master.deployment.deploy import one_process_is_faster
from master.joining.split import FirstSplit
from master.options import RunOptions
from master.workers.meeting import tell_apart
from master.workers.remote import RemoteWorker
from tests.support.paths import ROOT
from tpi.text import short_number, with_address


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (4361.7, "4362"), (123456789.0, "123456789"), (99.96, "100"), (12.345, "12.3"), (1.0, "1"), (0.5, "0.5"),
        (0.00001234, "0.0000123"), (0, "0"), (-4361.7, "-4362"), (float("inf"), "inf"), (999.6, "1000"),
    ],
)  # fmt: skip
def test_a_number_is_said_without_an_exponent(value: float, said: str) -> None:
    assert short_number(value) == said


def test_no_command_prints_a_number_with_an_exponent() -> None:
    rooms = ("tpi", "allreduce", "scheduler", "worker", "master", "testbed")
    files = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    assert not [str(path) for path in files if any(f":.{digits}g}}" in path.read_text() for digits in range(1, 7))]


def test_an_address_is_said_once() -> None:
    twins: Any = [SimpleNamespace(name="vm", address=f"127.0.0.1:{port}") for port in (1, 2)]
    tell_apart(twins)
    assert [one.name for one in twins] == ["vm (127.0.0.1:1)", "vm (127.0.0.1:2)"]
    assert {RemoteWorker._who.__get__(one) for one in twins} == {"vm (127.0.0.1:1)", "vm (127.0.0.1:2)"}
    assert with_address("vm", "h:1") == "vm (h:1)"
    assert with_address("h:1", "h:1") == "h:1"


def test_what_is_used_and_left_out_is_one_sentence() -> None:
    first: Any = FirstSplit
    split = first(None, ("h:1",), ("fast",), (), "slow left out: 3 tok/s expected without it")
    found = "using fast (h:1), slow (h:2); --workers none uses no other machine"
    assert split.words(found) == "using fast (h:1); slow left out: 3 tok/s expected without it"
    assert split.words("") == split.note
    assert first(None, ("h:1",), ("fast",), (), "").words(found) == found


def test_one_process_is_faster_where_the_model_fits_into_it(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(bytes(1 << 20))
    pack: Any = SimpleNamespace(path=tmp_path)
    asked: dict[str, Any] = {"model": "m", "local": 2, "memory": 2 << 20}
    assert one_process_is_faster(RunOptions(**asked), pack)
    assert not one_process_is_faster(RunOptions(**{**asked, "memory": 1 << 20}), pack)  # together they have more
    assert not one_process_is_faster(RunOptions(**{**asked, "local": 0}), pack)
    assert not one_process_is_faster(RunOptions(**asked, threads=1), pack)  # together they have more of these, too
