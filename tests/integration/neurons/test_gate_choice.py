"""What `--sparsity` does with SwiGLU models: which pack is used, what is measured, what is refused in which words."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from master.deployment import gates
from master.deployment.gates import GateChooser, GateFirstPack, is_gate_first
from master.deployment.sentgates import SentGates
from master.options import RunOptions, Sparsity
from tests.support.models import TinyModel
from tpi.errors import ModelError, UsageError
from tpi.kernels import open_kernels
from tpi.kernels.gated import GatedKernels
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.library.locate import locate, open_located, pack_name
from tpi.pack.library.record import PackRecord
from tpi.pack.reader import Pack
from tpi.sparsity.gates import GateCurves, measure_curves, save_curves
from tpi.sparsity.thresholds import NAME
from worker.neurons.gates.judge import Compared, compare_layouts

TEXT = np.random.default_rng(3).integers(3, 320, (2, 24)).astype(np.int32)


@pytest.fixture(scope="module")
def beside(tiny_model: Callable[[str], TinyModel], tmp_path_factory: pytest.TempPathFactory) -> GateFirstPack:
    """The model in q4, in a cache of its own."""
    cache = tmp_path_factory.mktemp("cache")
    return GateFirstPack(locate(str(tiny_model("llama3").directory), cache), "q4", cache, lambda nbytes: None)


@pytest.fixture(scope="module")
def profiled(beside: GateFirstPack) -> tuple[Pack, GateCurves]:
    pack = open_located(beside.located, beside.dtype, beside.cache)
    return pack, measure_curves(pack, TEXT, open_kernels())


@pytest.fixture
def plain(profiled: tuple[Pack, GateCurves]) -> Pack:
    """Its ordinary pack, with a profile."""
    pack, curves = profiled
    save_curves(pack.path / NAME, curves)
    return pack


def chooser(mode: Sparsity, accelerated: bool = False, error: float = 0.3) -> GateChooser:
    options = RunOptions("mine", dtype="q4", sparsity=mode, sparsity_error=error)
    return GateChooser(options, 1, open_kernels(), accelerated)


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_both_packs_lie_side_by_side(mode: Sparsity, plain: Pack, beside: GateFirstPack) -> None:
    pack, sent = chooser(mode).choose(plain, beside)
    assert is_gate_first(pack)
    assert not is_gate_first(plain)
    assert pack.path.parent == plain.path.parent
    assert pack.path.name == pack_name(beside.located, "q4", gate_first=True) != plain.path.name
    assert isinstance(sent, SentGates)
    assert sent.thresholds.error == 0.3
    assert pack.layers[0][1].shape == beside.shape()
    record = PackRecord.load(beside.cache, pack.path)
    assert record.gate_first
    assert record.identity == PackRecord.load(beside.cache, plain.path).identity


def test_off_and_a_model_of_another_kind_are_left_alone(
    plain: Pack, beside: GateFirstPack, tiny_pack: Callable[..., Pack]
) -> None:
    assert chooser("off").choose(plain, beside) == (plain, None)
    other = tiny_pack("opt")
    assert chooser("static").choose(other, beside) == (other, None)


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_without_a_profile_it_says_how_to_make_one(mode: Sparsity, plain: Pack, beside: GateFirstPack) -> None:
    (plain.path / NAME).unlink()
    with pytest.raises(
        UsageError, match=rf"--sparsity {mode}: mine has no profile.*tpi profile -m mine --dtype q4 --text"
    ):
        chooser(mode).choose(plain, beside)
    assert chooser("auto").choose(plain, beside) == (plain, None)


def test_a_pack_that_was_not_made_for_it_is_refused(plain: Pack) -> None:
    with pytest.raises(UsageError, match="tpi pack --gate-first"):
        chooser("static").choose(plain, None)
    assert chooser("auto").choose(plain, None) == (plain, None)


def test_an_accelerator_is_refused(plain: Pack, beside: GateFirstPack) -> None:
    with pytest.raises(UsageError, match="on the CPU alone, and a node has an accelerator; use --device cpu"):
        chooser("static", accelerated=True).choose(plain, beside)
    assert chooser("auto", accelerated=True).choose(plain, beside) == (plain, None)


@pytest.mark.parametrize("error", [OSError("the disk is full"), ModelError("it cannot be packed")])
def test_a_pack_that_cannot_be_made_ends_only_what_asked_for_it(
    plain: Pack,
    beside: GateFirstPack,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(pack: GateFirstPack) -> Pack:
        raise error

    monkeypatch.setattr(GateFirstPack, "open", fail)
    monkeypatch.setattr(GateChooser, "_pays", lambda *_: True)
    assert chooser("auto").choose(plain, beside) == (plain, None)
    assert f"sparsity is off: its gate-first pack cannot be made: {error}" in capsys.readouterr().err
    with pytest.raises(type(error)):
        chooser("static").choose(plain, beside)


def test_a_damaged_profile_is_named(plain: Pack, beside: GateFirstPack) -> None:
    (plain.path / NAME).write_bytes(b"nothing")
    with pytest.raises(ModelError, match=NAME):
        chooser("static").choose(plain, beside)


def test_a_pack_directory_made_for_it_is_used_as_it_is(
    plain: Pack, tiny_model: Callable[[str], TinyModel], tmp_path: Path
) -> None:
    pack_model(open_source(tiny_model("llama3").directory), "q4", tmp_path / "made", gate_first=True)
    made = Pack.open(tmp_path / "made")
    with pytest.raises(UsageError, match="no profile"):
        chooser("static").choose(made, None)
    (plain.path / NAME).rename(made.path / NAME)
    pack, sent = chooser("static").choose(made, None)
    assert pack is made
    assert sent is not None


def test_auto_is_measured_and_says_so(
    plain: Pack, beside: GateFirstPack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gates, "compare_layouts", lambda *given: Compared(0.004, 0.003))
    pack, sent = chooser("auto").choose(plain, beside)
    assert is_gate_first(pack)
    assert sent is not None
    assert not capsys.readouterr().err
    monkeypatch.setattr(gates, "compare_layouts", lambda *given: Compared(0.004, 0.005))
    assert chooser("auto").choose(plain, beside) == (plain, None)
    said = capsys.readouterr().err
    assert "sparsity is off, it does not pay here" in said
    assert "4.00 ms with all neurons and 5.00 ms gate first" in said
    assert "--sparsity-error 0.3" in said


def test_the_layouts_are_compared_with_their_own_kernels(plain: Pack, beside: GateFirstPack) -> None:
    """Both are timed, for as many layers as there are; what is faster is the machine's to say."""
    shape = next(block.shape for block in plain.walk() if block.kind == "ffn")
    kernels = open_kernels()
    assert isinstance(kernels, GatedKernels)
    layouts = (shape, beside.shape())
    found = [compare_layouts(kernels, plain.config, layouts, 1, [0.5] * count) for count in (1, 64)]
    assert all(each.plain > 0 and each.gated > 0 for each in found)


def test_a_gate_first_pack_that_lost_its_manifest_is_made_again_as_such(plain: Pack, beside: GateFirstPack) -> None:
    pack, _ = chooser("static").choose(plain, beside)
    (pack.path / "manifest.json").unlink()
    again = beside.open()
    assert is_gate_first(again)
    again.verify()
    assert replace(beside, dtype="q8").open().path != again.path
