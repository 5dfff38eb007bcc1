"""A file as PowerInfer writes it, computed with the predictors in it."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from master.deployment.numbering import numbered_for
from master.profiling.measure import profile_model
from master.profiling.numbering import Numbering
from tests.support.cluster.inprocess import in_process_deployment
from tests.support.devices.offloading import answers
from tests.support.models import SIZES, TinyModel
from tests.support.weights.powerinfer_models import F32, powerinfer_tensors, write_powerinfer
from tpi.kernels import open_kernels
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack
from tpi.progress import silent
from tpi.sparsity.files import NAME, load_predictors

PROMPT, LENGTH = [3, 14, 15, 9, 2, 6], 16


@pytest.fixture(scope="module")
def model() -> TinyModel:
    """A random Llama with ReLU."""
    import torch
    import transformers

    torch.manual_seed(5)
    reference = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, hidden_act="relu")).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            spread = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
            parameter.add_(torch.randn_like(parameter) * spread)
    return TinyModel(Path(), reference)


def right(model: TinyModel, layer: int) -> tuple[F32, F32]:
    """Return a predictor that is always right: RMS norm keeps signs, so hidden states tell the sign of a gate."""
    block = model.reference.model.layers[layer]
    gate = block.mlp.gate_proj.weight.detach().numpy() * block.post_attention_layernorm.weight.detach().numpy()
    one = np.eye(gate.shape[1], dtype=np.float32)
    return np.concatenate([one, -one]), np.concatenate([gate, -gate], axis=1)


@pytest.fixture
def never_dense(monkeypatch: pytest.MonkeyPatch) -> Callable[..., float]:
    def limit(*given: object) -> float:
        return 1.0

    monkeypatch.setattr("worker.neurons.judge.measure_limit", limit)
    return limit


@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("renumbered", [False, True], ids=["own", "renumbered"])
@pytest.mark.parametrize("shares", [[1.0], [3.0, 2.0, 1.0]], ids=["one", "three"])
def test_its_tokens_are_those_of_the_reference(
    model: TinyModel, shares: list[float], renumbered: bool, tmp_path: Path
) -> None:
    import torch

    file = tmp_path / "tiny.powerinfer.gguf"
    tensors = powerinfer_tensors(model, {layer: right(model, layer) for layer in range(2)})
    write_powerinfer(file, model, tensors, threshold=1e-20)
    pack_model(open_source(file), "auto", tmp_path / "pack")
    pack = Pack.open(tmp_path / "pack")
    pack = profiled(pack, shares, tmp_path) if renumbered else pack
    predictors = load_predictors(pack.path / NAME)
    with torch.no_grad():
        asked = torch.tensor([PROMPT])
        expected = model.reference.generate(asked, max_new_tokens=LENGTH, do_sample=False, eos_token_id=None)
    made = in_process_deployment(pack, shares, tmp_path, predictors=predictors, sparsity="static")
    with closing(made) as deployment:
        assert answers(deployment, [PROMPT], LENGTH) == [expected[0, len(PROMPT) :].tolist()]
        assert deployment.node.sparse is not None
        judge = deployment.node.sparse.judge
        assert 0.2 < judge.chosen / judge.of < 0.8


def profiled(pack: Pack, shares: list[float], cache: Path) -> Pack:
    """Return the pack with new numbers, from a text of random tokens."""
    tokens = np.random.default_rng(0).integers(0, pack.config.vocab, (2, 32)).astype(np.int32)
    Numbering.of(pack, profile_model(pack, tokens, open_kernels(), silent), shares).keep(cache, silent)
    found = numbered_for("static", pack, shares, cache)
    assert found.path != pack.path
    return found
