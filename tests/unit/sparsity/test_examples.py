"""Training examples of predictors: which input belongs to which activity, in memory and in files."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from master.profiling.measure import profile_model
from tests.support.examples import examples_of
from tests.support.weights.trained import write_trained
from tpi.errors import ModelError, WeightsError
from tpi.kernels import open_kernels
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack
from tpi.progress import Progress, silent
from tpi.sparsity.examples import SEQUENCES, ExampleFiles, LayerExamples, token_bytes
from tpi.sparsity.replay import FfnWeights, dense, replay

TOKENS = np.random.default_rng(3).integers(3, 320, (3, 24)).astype(np.int32)
MANY = np.random.default_rng(4).integers(3, 320, (2 * SEQUENCES + 3, 16)).astype(np.int32)
BAMBOO = {"architectures": ["BambooForCausalLM"], "model_type": "bamboo", "hidden_act": "relu", "sliding_window": None}


class Stopped(BaseException):
    """Stops the command as a kill would."""


def stop_after(sequences: int) -> Progress:
    def progress(done: int, total: int) -> None:
        if done >= sequences:
            raise Stopped

    return progress


def alike(found: dict[int, LayerExamples], expected: dict[int, LayerExamples]) -> bool:
    return found.keys() == expected.keys() and all(
        (one.inputs == expected[at].inputs).all()
        and (one.bits == expected[at].bits).all()
        and (one.ahead, one.neurons) == (expected[at].ahead, expected[at].neurons)
        for at, one in found.items()
    )


def test_a_layer_gets_the_input_of_the_one_it_looks_ahead_from(tiny_pack: Callable[..., Pack]) -> None:
    pack, kernels = tiny_pack("opt"), open_kernels()
    own, ahead = examples_of(pack, TOKENS, kernels), examples_of(pack, TOKENS, kernels, 1)
    assert [one.ahead for one in ahead.values()] == [0] + [1] * (pack.config.layers - 1)
    assert own[1].inputs.shape == (TOKENS.size, pack.config.hidden)
    assert (ahead[1].inputs == own[0].inputs).all()
    assert not (own[1].inputs == own[0].inputs).all()
    assert (ahead[1].bits == own[1].bits).all()
    assert 0 < own[1].rows(slice(None))[1].mean() < 1


def test_files_are_the_same_whenever_collecting_stopped(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    pack, kernels, files = tiny_pack("opt"), open_kernels(), ExampleFiles(tmp_path / "examples", "a")
    expected = examples_of(pack, MANY, kernels, 1)
    with pytest.raises(Stopped):
        files.collect(pack, MANY, kernels, 1, stop_after(SEQUENCES))
    steps: list[int] = []
    found = files.collect(pack, MANY, kernels, 1, lambda done, total: steps.append(done))
    assert steps == [SEQUENCES, 2 * SEQUENCES, len(MANY)]
    assert alike(found, expected)
    assert alike(files.collect(pack, MANY, kernels, 1, stop_after(len(MANY) + 1)), expected)
    kept = [file.stat().st_size for file in files.folder.iterdir() if file.suffix != ".json"]
    assert sum(kept) == token_bytes(pack) * MANY.size
    files.remove()
    assert not files.folder.exists()


@pytest.mark.parametrize("damage", ["other", "short", "garbled"])
def test_what_cannot_be_gone_on_with_is_collected_anew(
    tiny_pack: Callable[..., Pack], tmp_path: Path, damage: str
) -> None:
    pack, kernels, files = tiny_pack("opt"), open_kernels(), ExampleFiles(tmp_path / "examples", "a")
    files.collect(pack, MANY, kernels)
    tokens = MANY
    if damage == "other":
        files, tokens = ExampleFiles(files.folder, "b"), MANY[:, ::-1].copy()
    elif damage == "short":
        (files.folder / "inputs.f16").write_bytes(b"")
    else:
        (files.folder / "done.json").write_text(json.dumps({"of": "a"}))
    assert alike(files.collect(pack, tokens, kernels), examples_of(pack, tokens, kernels))


def test_files_that_cannot_be_written_are_refused_by_name(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError, match=r"cannot write .*file.*use fewer --tokens"):
        ExampleFiles(tmp_path / "file" / "examples", "a").collect(tiny_pack("opt"), TOKENS, open_kernels())


def test_activations_that_are_never_0_are_refused(tiny_pack: Callable[..., Pack]) -> None:
    with pytest.raises(ModelError, match="silu activations, which are never 0; give a model with ReLU"):
        examples_of(tiny_pack("llama"), TOKENS, open_kernels())


def test_with_drelu_gate_and_up_decide(tmp_path: Path) -> None:
    """The trained model's weights as in Bamboo: about half of the neurons with a positive gate are active."""
    directory, kernels = write_trained(tmp_path / "bamboo"), open_kernels()
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | BAMBOO))
    pack_model(open_source(directory), "f32", tmp_path / "pack")
    pack = Pack.open(tmp_path / "pack")
    gates, both = [], []

    def see(layer: int, weights: FfnWeights, x: np.ndarray) -> np.ndarray:
        assert weights.gate is not None
        gates.append(x @ weights.gate.T > 0)
        both.append(gates[-1] & (x @ weights.up.T > 0))
        return dense(layer, weights, x)

    replay(pack, TOKENS, kernels, see)
    found, use = examples_of(pack, TOKENS, kernels), profile_model(pack, TOKENS, kernels, silent)
    for layer, active in enumerate(both):
        np.testing.assert_array_equal(found[layer].rows(slice(None))[1], active)
        np.testing.assert_array_equal(use.active(layer), active)
    assert np.mean(both) < 0.8 * np.mean(gates)
