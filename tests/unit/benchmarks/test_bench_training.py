"""The training loop: text split by files, runs that resume, and a penalty that makes activations sparse."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from benchmarks.training import corpus, mixture, model
from benchmarks.training.measure import LayerUse
from benchmarks.training.state import Progress, resume
from benchmarks.training.train import Recipe, optimizer_of, train
from benchmarks.training.vocabulary import BEGIN_ID, END_ID, encode, train_tokenizer

TOKENS = np.random.default_rng(0).zipf(1.4, 4000).clip(max=99).astype(np.uint16)
RECIPE = Recipe(steps=4, sequences=2, length=32, warm_up=2, kept_every=2, narrow_steps=2, narrow_rank=4)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return a model of a few thousand parameters, on one thread."""
    import torch

    torch.set_num_threads(1)
    sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}  # fmt: skip
    monkeypatch.setattr(model, "SHAPE", model.SHAPE | sizes)


def weights_of(folder: Path) -> dict[str, Any]:
    built = model.build()
    resume(folder, built, optimizer_of(built, RECIPE))
    return {name: value.detach().numpy() for name, value in built.named_parameters()}


@pytest.mark.usefixtures("small")
def test_a_run_that_stopped_goes_on_to_the_same_end(tmp_path: Path) -> None:
    assert train(model.build(), TOKENS, RECIPE, tmp_path / "whole")
    assert not train(model.build(), TOKENS, RECIPE, tmp_path / "parts", seconds=0)
    for steps in (2, 4, 6):  # schedules look at the number of all steps, so that a part is one of the same run
        part = replace(RECIPE, stop=steps)
        assert train(model.build(seed=steps), TOKENS, part, tmp_path / "parts") == (steps == 6)
    whole, parts = weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts")
    for name, values in whole.items():
        np.testing.assert_allclose(parts[name], values, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("small")
def test_the_penalty_follows_the_share_that_is_sought(tmp_path: Path) -> None:
    sparse = replace(RECIPE, steps=60, narrow_steps=0, active=0.05, settled=0.2, rate=1e-2, kept_every=100)
    free = replace(sparse, active=0.49)
    shares = []
    for recipe in (sparse, free):
        folder = tmp_path / str(recipe.active)
        train(model.build(), TOKENS, recipe, folder)
        built = model.build()
        history = resume(folder, built, optimizer_of(built, recipe)).history
        assert history is not None
        shares.append(history[-1]["active"])
    assert shares[0] < 0.5 * shares[1]


@pytest.mark.usefixtures("small")
def test_the_second_part_leaves_the_gates_their_rank(tmp_path: Path) -> None:
    recipe = replace(RECIPE, steps=2, narrow_steps=40, narrow_rate=1e-2, kept_every=100)
    shares = []
    for name, strength in (("free", 0.0), ("narrow", 6.0)):
        built = model.build()
        train(built, TOKENS, replace(recipe, narrowness=strength), tmp_path / name)
        shares.append(float(model.beyond_rank(built, 4).detach()))
    assert shares[1] < 0.5 * shares[0]
    weight = built.model.layers[0].mlp.gate_proj.weight.detach().numpy()
    singular = np.square(np.linalg.svd(weight, compute_uv=False))
    other = np.square(np.linalg.svd(built.model.layers[1].mlp.gate_proj.weight.detach().numpy(), compute_uv=False))
    beyond = np.mean([values[4:].sum() / values.sum() for values in (singular, other)])
    assert shares[1] == pytest.approx(beyond, abs=1e-4)


def test_nothing_is_both_held_out_and_trained_on() -> None:
    for held in (True, False):
        texts = set()
        for text in corpus.documents(held):
            texts.add(text)
            if len(texts) == 20:
                break
        assert len(texts) == 20
    assert not set(corpus.documents(True)) & {text for text in corpus.documents(False) if len(text) > 200}
    assert corpus.held_out("calendar.py") in (True, False)


def test_documents_are_tokens_between_marks() -> None:
    tokenizer = train_tokenizer(["def f(x):\n    return x\n" * 20])
    found = encode(tokenizer, ["def f(x):", "return"])
    assert list(found[[0, -1]]) == [BEGIN_ID, END_ID]
    middle = found.tolist().index(END_ID)
    assert tokenizer.decode(found[1:middle].tolist()) == "def f(x):"
    assert found[middle + 1] == BEGIN_ID


def test_a_run_at_its_beginning_has_no_history(tmp_path: Path) -> None:
    assert resume(tmp_path, None, None) == Progress()


def test_how_neurons_are_used_is_counted() -> None:
    active = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 0]], np.bool_)
    found = LayerUse.of(active)
    assert (found.active, found.dead) == (0.375, 0.25)
    assert found.similar == pytest.approx(3 / 5)  # of the five activations after the first token three are again
    assert found.always == pytest.approx(5 / 6, abs=1e-3)  # the two most frequent of four
    assert found.hot == 0.25  # one neuron has four of six activations: two are needed for 80%, and one is below


def test_a_mixture_is_trained_and_its_experts_are_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss falls and experts are balanced. The names are those of checkpoints, and give the same model."""
    import torch
    import transformers

    torch.set_num_threads(1)
    sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4}  # fmt: skip
    monkeypatch.setattr(mixture, "SHAPE", mixture.SHAPE | sizes)
    built, recipe = mixture.build(), replace(RECIPE, steps=30, narrow_steps=0, rate=1e-2, kept_every=100)
    assert train(built, TOKENS, recipe, tmp_path, opened=mixture.balanced)
    history = resume(tmp_path, mixture.build(), optimizer_of(mixture.build(), recipe)).history
    assert history is not None
    assert history[-1]["loss"] < 0.8 * np.log(100)  # which knowing nothing costs
    assert 2 <= history[-1]["balance"] < 3  # of two experts a token: 2 if even, 4 if always the same two
    config = {"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", **mixture.SHAPE}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(mixture.weights(built), tmp_path / "model.safetensors")
    again = transformers.OlmoeForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, value in built.named_parameters():
        assert torch.equal(value, again.get_parameter(name)), name
