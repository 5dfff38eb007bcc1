"""Models with ReLU feed-forward networks, as their config.json is published, against transformers in f32.

Transformers has no classes for Bamboo and ProSparse: they are its Mistral and Llama with the feed-forward network that
their model cards give.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.differential.stand_ins import fatrelu, gated
from tests.support.models import SIZES, forward, write_tokenizer
from tests.support.weights.split import split_forward
from tpi.config import ModelConfig
from tpi.errors import ModelError
from tpi.families.huggingface.reader import from_huggingface
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack

TOKENS = [1, *np.random.default_rng(5).integers(3, 320, 40).tolist()]
THRESHOLD = 0.2
# What the published files say, where it matters.
RELU_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "relu"}
PROSPARSE = {
    "architectures": ["SparseLlamaForCausalLM"], "model_type": "sparsellama", "hidden_act": "fatrelu",
    "hidden_act_param": 0.01,
}  # fmt: skip
BAMBOO = {
    "architectures": ["BambooForCausalLM"], "model_type": "bamboo", "hidden_act": "relu", "sliding_window": 12,
    "rope_theta": 10000.0,
}  # fmt: skip
NEMOTRON = {"architectures": ["NemotronForCausalLM"], "hidden_act": "relu2", "partial_rotary_factor": 0.5}


def config_of(fields: dict[str, Any]) -> ModelConfig:
    return from_huggingface(SIZES | fields, lambda name: "lm_head" not in name, "somewhere").config


def made(name: str, fields: dict[str, Any], directory: Path) -> Any:
    """A random model of transformers' class `name` with `fields`, saved in `directory`; gates are spread out."""
    import torch
    import transformers

    config = getattr(transformers, f"{name}Config")(**SIZES, **fields)
    torch.manual_seed(3)
    model = getattr(transformers, f"{name}ForCausalLM")._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            spread = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
            parameter.add_(torch.randn_like(parameter) * spread)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return model


def packed(directory: Path, published: dict[str, Any]) -> Pack:
    """The saved model under the published names, as a pack in f32."""
    found = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(found | published))
    pack_model(open_source(directory), "f32", directory / "pack")
    return Pack.open(directory / "pack")


def logits_of(model: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    import torch

    with torch.no_grad():
        found: np.ndarray[Any, np.dtype[np.float32]] = model(torch.tensor([TOKENS]), use_cache=False).logits[0].numpy()
    return found


def close(pack: Pack, expected: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    for found in (forward(pack, TOKENS), split_forward(pack, TOKENS, (0.6, 0.4), steps=3)):
        assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    assert {run.layout for layer in pack.layers for run in layer[1].shape.runs} == {"record"}


def test_relu_llama(tmp_path: Path) -> None:
    model = made("Llama", {"hidden_act": "relu"}, tmp_path)
    close(packed(tmp_path, RELU_LLAMA), logits_of(model))


@pytest.mark.parametrize("architecture", ["SparseLlamaForCausalLM", "LlamaForCausalLM"])
def test_prosparse(architecture: str, tmp_path: Path) -> None:

    model = made("Llama", {"hidden_act": "relu"}, tmp_path)
    plain = logits_of(model)
    for layer in model.model.layers:
        layer.mlp.forward = gated(layer.mlp, fatrelu(THRESHOLD), both=False)
    expected = logits_of(model)
    assert np.abs(expected - plain).max() > 1e-2 * np.abs(plain).max()  # the threshold counts
    published = PROSPARSE | {"architectures": [architecture], "hidden_act_param": THRESHOLD}
    close(packed(tmp_path, published), expected)


def test_bamboo(tmp_path: Path) -> None:
    import torch

    model = made("Mistral", {"hidden_act": "relu", "sliding_window": 12}, tmp_path)
    for layer in model.model.layers:
        layer.mlp.forward = gated(layer.mlp, torch.relu, both=True)
    close(packed(tmp_path, BAMBOO), logits_of(model))


def test_nemotron(tmp_path: Path) -> None:
    model = made("Nemotron", {}, tmp_path)
    pack = packed(tmp_path, {})
    assert (pack.config.activation, pack.config.gated, pack.config.norm) == ("relu2", False, "layer")
    close(pack, logits_of(model))


def test_published_configurations_are_what_they_say() -> None:
    assert config_of(RELU_LLAMA).activation == "relu"
    prosparse = config_of(PROSPARSE)
    assert (prosparse.activation, prosparse.activation_threshold) == ("fatrelu", 0.01)
    bamboo = config_of(BAMBOO)
    assert (bamboo.activation, bamboo.windows, bamboo.gated) == ("drelu", (12, 12), True)
    nemotron = config_of(NEMOTRON)
    assert len(nemotron.inv_freq) == nemotron.head_dim // 4
    assert ModelConfig.from_dict(prosparse.to_dict()) == prosparse


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (PROSPARSE | {"hidden_act_param": None}, "hidden_act_param"),
        (PROSPARSE | {"hidden_act_param": "much"}, "hidden_act_param"),
        (PROSPARSE | {"hidden_act": "silu"}, "'silu'; supported are fatrelu and relu"),
        (BAMBOO | {"hidden_act": "silu"}, "'silu'; relu is supported"),
        (RELU_LLAMA | {"hidden_act": "fatrelu"}, "hidden_act_param"),
        (NEMOTRON | {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "'yarn'"),
        ({"architectures": ["MistralForCausalLM"], "hidden_act": "fatrelu"}, "fatrelu"),
    ],
)
def test_what_would_change_the_answers_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        config_of(fields)
