"""Infinite values and NaN cause an error that names their source: a worker, the head, the model's file, a message."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from allreduce import measure
from master.generation.answer import AnswerLimits
from master.options import RunOptions
from master.session import Session
from master.vocabulary.sampler import Sampler, Sampling
from tests.support.cluster.cluster_helpers import announced
from tests.support.generating import answer_in
from tests.support.models import TinyModel
from tests.support.paths import ROOT
from tpi.errors import ModelError, NotFiniteError
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.groups import group_factors, quantise_groups


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logits_that_are_no_numbers_are_refused(bad: float, temperature: float) -> None:
    logits = np.array([0.0, 1.0, bad, 2.0], np.float32)
    with pytest.raises(NotFiniteError, match="logits are not finite"):
        Sampler(Sampling(temperature=temperature, seed=1)).sample(logits)


def test_a_worker_that_sends_nan_is_named_in_one_sentence(
    tiny_model: Callable[[str], TinyModel], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-m", "tests.support.processes.nan_worker", str(tmp_path / "shards")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        try:
            address, model = announced(process), str(tiny_model("llama").directory)
            for temperature in (0.0, 0.8):
                with pytest.raises(NotFiniteError, match=r"sum after the last block is not finite.*--verify-weights"):
                    generate(RunOptions(model, workers=(address,), context=64, cache=tmp_path), temperature)
            checked = RunOptions(model, workers=(address,), context=64, cache=tmp_path, verify_weights=True)
            generate(checked, 0.0)  # goes on without it
            assert "result of ffn 0 is not finite" in capsys.readouterr().err
        finally:
            process.kill()


def generate(placement: RunOptions, temperature: float) -> None:
    with Session(placement) as session:
        answer_in(session, [1, 5, 9], Sampler(Sampling(temperature=temperature)), AnswerLimits(4, ignore_eos=True))


@pytest.mark.parametrize("tensor", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
@pytest.mark.parametrize("dtype", ["f32", "q4"])
def test_a_model_with_nan_is_refused_when_it_is_packed(
    tensor: str, dtype: str, tiny_model: Callable[[str], TinyModel], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(tiny_model("llama").directory, source)
    (file,) = source.glob("*.safetensors")
    weights = load_file(file)
    weights[tensor].reshape(-1)[7] = np.nan
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ModelError, match="infinite or NaN"):
        pack_model(open_source(source), dtype, tmp_path / "pack")


@pytest.mark.parametrize(("format", "factors"), [("q8", 1), ("q4s", 1), ("q4", 2)])
def test_scales_of_quantised_weights_are_seen(format: str, factors: int) -> None:
    blocks = quantise_groups(format, np.ones((3, 64), np.float32)).reshape(3, -1)  # type: ignore[arg-type]
    found = group_factors(format, blocks)  # type: ignore[arg-type]
    assert found.shape == (3, 2, factors)
    assert np.isfinite(found).all()
    blocks[1, :2] = 0xFF
    assert np.isnan(group_factors(format, blocks)[1, 0, 0])  # type: ignore[arg-type]


def test_a_measurement_that_is_no_number_is_not_believed() -> None:
    low, high = (np.array(bound, np.float32) for bound in measure.PLAUSIBLE)
    claims = np.array([[np.nan, np.nan], [np.inf, -np.inf], [-1.0, 0.0], [0.01, 1e6]], np.float32)
    found = measure.plausible(claims)
    assert ((found >= low) & (found <= high)).all()
    np.testing.assert_array_equal(found[3], claims[3])
