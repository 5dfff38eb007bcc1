"""Every tensor of a file is used or reported, and a head in the file is used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.models import TinyModel, forward
from tpi.errors import ModelError
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack

Tiny = Callable[[str], TinyModel]
TOKENS = [1, 17, 300, 42, 42, 7, 250, 9]


def changed(source: Path, target: Path, extra: dict[str, Any]) -> Path:
    """A copy of a tiny model whose file holds `extra` tensors too."""
    target.mkdir(exist_ok=True)
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    save_file(load_file(source / "model.safetensors") | extra, target / "model.safetensors")
    return target


def packed(directory: Path) -> Pack:
    pack_model(open_source(directory), "f32", directory / "pack")
    return Pack.open(directory / "pack")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("llama", "model.layers.1.self_attn.q_norm.weight"),
        ("llama", "model.layers.2.mlp.up_proj.weight"),  # a layer more than the configuration says
        ("qwen2", "model.layers.0.self_attn.sinks"),
        ("phi3", "model.layers.0.self_attn.qkv_proj.bias"),
        ("gemma2", "vision_tower.patch.weight"),
    ],
)
def test_unknown_tensor_is_refused_by_name(model: str, name: str, tiny_model: Tiny, tmp_path: Path) -> None:
    directory = changed(tiny_model(model).directory, tmp_path, {name: np.ones(4, np.float32)})
    with pytest.raises(ModelError, match=rf"tensors that {model} models do not have: {name}"):
        packed(directory)
    assert not (tmp_path / "pack").exists()


def test_untaken_rows_of_a_fused_tensor_are_refused(tiny_model: Tiny, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.qkv_proj.weight"
    fused = load_file(tiny_model("phi3").directory / "model.safetensors")[name]
    directory = changed(tiny_model("phi3").directory, tmp_path, {name: np.concatenate([fused, fused[:16]])})
    with pytest.raises(ModelError, match=rf"rows 192 to 208 of {name}"):
        packed(directory)


def test_tensors_that_hold_nothing_are_harmless(tiny_model: Tiny, tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    plain = packed(changed(tiny_model("llama").directory, tmp_path / "plain", {}))
    assert (
        packed(changed(tiny_model("llama").directory, tmp_path / "extra", extra)).blocks.keys() == plain.blocks.keys()
    )


@pytest.mark.parametrize("name", ["llama3", "opt"])  # both say tie_word_embeddings
def test_a_separate_head_counts_although_the_config_ties_it(name: str, tiny_model: Tiny, tmp_path: Path) -> None:
    import torch
    import transformers

    plain = tiny_model(name)
    shape = plain.reference.lm_head.weight.shape
    own = np.random.default_rng(3).standard_normal(shape, np.float32)
    directory = changed(plain.directory, tmp_path, {"lm_head.weight": own})
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = reference(torch.tensor([TOKENS])).logits[0].numpy()
    np.testing.assert_allclose(forward(packed(directory), TOKENS), expected, rtol=1e-3, atol=1e-3)


def test_a_head_equal_to_the_embedding_is_kept_once(tiny_model: Tiny, tmp_path: Path) -> None:
    source = tiny_model("llama3").directory
    table = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    pack = packed(changed(source, tmp_path, {"lm_head.weight": table}))
    assert pack.head is pack.embedding
    assert pack.weight_bytes == packed_bytes(source, tmp_path)


def packed_bytes(source: Path, directory: Path) -> int:
    pack_model(open_source(source), "f32", directory / "plain")
    return Pack.open(directory / "plain").weight_bytes
