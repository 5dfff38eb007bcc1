"""A graphics chip that `auto` found and that then fails: the CPU continues alone, and one sentence says so."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import master.planning.node
import worker.equipment
from master.generation.answer import AnswerLimits
from master.options import RunOptions
from master.planning.node import NodeFlags, planned_node
from master.session import Session
from master.vocabulary.sampler import Sampler, Sampling
from scheduler.model.machine import Accelerator, DeviceLink, Rates
from tests.support.devices.twin import Twin
from tests.support.generating import answer_in
from tests.support.models import TinyModel
from tpi.devices.base import Device
from tpi.devices.host import open_host
from tpi.devices.options import DeviceOptions, OffloadOptions
from tpi.errors import DeviceError, KernelError, PlanError, TpiError
from tpi.kernels import Kernels
from tpi.pack.reader import Pack
from worker.measure import remembered

MIB = 1 << 20
LEFT_OUT = "the graphics chip is not used, and the CPU computes alone"
PROMPT = range(3, 20)


class Chip(Twin):
    """A device that counts how often it was closed."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__(kernels, 8 * MIB)
        self.closed = 0

    def close(self) -> None:
        self.closed += 1
        super().close()


Found = Callable[..., Chip]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[Found]:
    """Yield a function that makes `auto` find a chip, of whose kernels the named calls fail."""
    with ExitStack() as stack:

        def put(*failing: str, **attributes: Any) -> Chip:
            chip = Chip(open_host().kernels)
            stack.callback(chip.close)
            for name in failing:
                monkeypatch.setattr(chip.kernels, name, refuse, raising=False)
            for name, value in attributes.items():
                monkeypatch.setattr(chip.kernels, name, value, raising=False)
            monkeypatch.setattr(worker.equipment, "find_accelerator", lambda limit=None: chip)
            return chip

        yield put


def refuse(*arguments: object, **named: object) -> None:
    raise KernelError("the OpenCL compiler refuses the program; install another driver")


def fail(*arguments: object, **named: object) -> None:
    raise RuntimeError("CUDA error: unspecified launch failure\nCompile with TORCH_USE_CUDA_DSA")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the measurement of the chip, so that it seems faster than any host."""

    def measure(device: Device, *sample: object) -> Accelerator:
        return Accelerator(Rates(1e15, 1e18), 8 * MIB, DeviceLink(1e15, 1e15), device.name)

    monkeypatch.setattr(remembered, "measure_device", measure)


def answer(model: Path, cache: Path, devices: DeviceOptions) -> tuple[list[int], bool]:
    """Return greedy tokens, and whether an accelerator took part in computing them."""
    with Session(RunOptions(str(model), context=64, devices=devices, cache=cache)) as session:
        made = answer_in(session, PROMPT, Sampler(Sampling(temperature=0)), AnswerLimits(4, ignore_eos=True))
        return made.token_ids, session.node.link is not None


AUTO, CPU = DeviceOptions(), DeviceOptions(("cpu",))
ASKED = DeviceOptions(offload=OffloadOptions(kv="gpu"))  # auto, with a flag about an accelerator


@pytest.mark.usefixtures("quick")
def test_one_that_works_is_used(
    found: Found, tiny_pack: Callable[..., Pack], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found()
    path = tiny_pack("llama").path
    expected, _ = answer(path, tmp_path, CPU)
    assert answer(path, tmp_path, AUTO) == (expected, True)
    assert "twin: the support for such devices is experimental" in capsys.readouterr().err


@pytest.mark.parametrize("measured", [True, False])
def test_one_that_raises_what_tpi_does_not_know_is_left_out(
    measured: bool, found: Found, tiny_pack: Callable[..., Pack], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """It raises during its measurement, or, if its figures are remembered, while it computes the first block."""
    if measured:
        request.getfixturevalue("quick")
    chip, path = found(attention=fail, ffn=fail), tiny_pack("llama").path
    assert answer(path, tmp_path, AUTO)[1] is False
    said = [line for line in capsys.readouterr().err.splitlines() if "chip" in line]
    assert said == [f"tpi: {LEFT_OUT}: CUDA error: unspecified launch failure"]
    assert chip.memory.used == 0


@pytest.mark.usefixtures("quick")
def test_a_chip_that_fails_in_an_answer_is_left_out_of_the_rest(
    found: Found, tiny_pack: Callable[..., Pack], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From some step on, every call of the device fails, as after a sticky error of a card."""
    path, left = tiny_pack("llama").path, [12]
    kernels = open_host().kernels

    def tires(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise DeviceError("cuda:0 failed: CUDA error: an illegal memory access; choose another device")
            return getattr(kernels, name)(*arguments, **named)

        return call

    chip = found(**{name: tires(name) for name in ("attention", "ffn")})
    expected, _ = answer(path, tmp_path, CPU)
    with Session(RunOptions(str(path), context=64, devices=AUTO, cache=tmp_path)) as session:
        assert session.node.link is not None
        made = answer_in(session, PROMPT, Sampler(Sampling(temperature=0)), AnswerLimits(4, ignore_eos=True))
        assert made.token_ids == expected
        assert session.node.link is None
    assert left[0] < 0
    assert chip.closed == 1
    assert chip.memory.used == 0
    assert f"{LEFT_OUT}: cuda:0 failed: CUDA error: an illegal memory access\n" in capsys.readouterr().err


def test_a_plan_leaves_out_one_that_cannot_be_measured(
    found: Found, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chip = found(ffn=fail)
    monkeypatch.setattr(master.planning.node, "find_accelerator", lambda: chip)
    planned = planned_node(NodeFlags(devices=("auto",)), tmp_path, ())
    assert planned.machine.accelerator is None
    assert capsys.readouterr().err.count(f"{LEFT_OUT}: CUDA error") == 1
    assert chip.closed == 1


def test_one_that_cannot_be_measured_is_left_out(
    found: Found, tiny_pack: Callable[..., Pack], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chip, path = found("ffn"), tiny_pack("llama").path
    expected, _ = answer(path, tmp_path, CPU)
    assert answer(path, tmp_path, AUTO) == (expected, False)
    said = [line for line in capsys.readouterr().err.splitlines() if "chip" in line or "twin" in line]
    assert said == [f"tpi: {LEFT_OUT}: the OpenCL compiler refuses the program"]
    assert chip.closed == 1


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("failing", ["attention", "ffn"])
def test_a_chip_whose_kernels_fail_is_left_out_before_the_answer(
    failing: str, found: Found, tiny_pack: Callable[..., Pack], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cached measurements of the chip are from another version of its driver."""
    chip, path = found(failing), tiny_pack("llama").path
    expected, _ = answer(path, tmp_path, CPU)
    assert answer(path, tmp_path, AUTO) == (expected, False)
    assert capsys.readouterr().err.count(LEFT_OUT) == 1
    assert chip.memory.used == 0


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("family", ["gptoss", "deepseek2", "qwen35"])
def test_one_that_does_not_know_the_model_is_left_out(
    family: str, found: Found, tiny_model: Callable[[str], TinyModel], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    found(plain_models=True)
    directory = tiny_model(family).directory
    expected, _ = answer(directory, tmp_path, CPU)
    assert answer(directory, tmp_path, AUTO) == (expected, False)
    said = [line for line in capsys.readouterr().err.splitlines() if "chip" in line or "twin" in line]
    assert len(said) == 1
    assert LEFT_OUT in said[0]


@pytest.mark.parametrize(("failing", "family"), [("ffn", "llama"), ("", "gptoss")])
def test_one_that_was_asked_for_is_refused(
    failing: str, family: str, found: Found, tiny_model: Callable[[str], TinyModel], tmp_path: Path
) -> None:
    """It was requested by its name, or by a flag about an accelerator."""
    chip = found(*([failing] if failing else []), plain_models=True)
    kind: type[TpiError] = KernelError if failing else PlanError
    with pytest.raises(kind, match="install another driver" if failing else "use --device cpu"):
        answer(tiny_model(family).directory, tmp_path, ASKED)
    assert chip.closed == 1
    assert chip.memory.used == 0
