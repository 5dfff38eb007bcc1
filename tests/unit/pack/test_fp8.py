"""FP8 weights with scales: the values of the file by its specification, for each way to share a scale."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.models import TinyModel
from tpi.errors import ModelError
from tpi.families.huggingface.configonly import from_config
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack
from tpi.sources.fp8 import apply_scales
from tpi.sources.quantised.source import method_of
from tpi.sources.safetensors import open_safetensors

BLOCK = (24, 40)  # rows and columns; no size of the tiny model is a multiple of both
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
DEEPSEEK = FP8 | {"weight_block_size": list(BLOCK), "modules_to_not_convert": ["lm_head"]}


def compressed(strategy: str, **more: Any) -> dict[str, Any]:
    """Return a `quantization_config` of compressed-tensors."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **more}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip


KINDS: dict[str, tuple[str, tuple[int, int], dict[str, Any]]] = {
    "DeepSeek's blocks": ("_scale_inv", BLOCK, DEEPSEEK),
    "a scale per tensor": ("_scale_inv", (0, 0), FP8),
    "compressed-tensors, per channel": ("_scale", (1, 0), compressed("channel")),
    "compressed-tensors, blocks": ("_scale", BLOCK, compressed("block", block_structure=list(BLOCK))),
}


def quantised(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, scales and the values that they mean; a block of 0 is as large as the matrix."""
    high, wide = (size or whole for size, whole in zip(block, weight.shape, strict=True))
    rows, columns = -(-weight.shape[0] // high), -(-weight.shape[1] // wide)
    padded = torch.zeros(rows * high, columns * wide)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    scales = padded.view(rows, high, columns, wide).abs().amax((1, 3)) / 448
    whole = scales.repeat_interleave(high, 0).repeat_interleave(wide, 1)[: weight.shape[0], : weight.shape[1]]
    codes = (weight / whole).to(torch.float8_e4m3fn)
    return codes, scales, codes.to(torch.float32) * whole


def write(model: Path, out: Path, kind: str) -> tuple[Path, Path]:
    """Write a model in FP8, and the same with its exact values in float32."""
    suffix, block, config = KINDS[kind]
    coded, plain = load_file(model / "model.safetensors"), load_file(model / "model.safetensors")
    for name in [name for name in coded if name.endswith("_proj.weight")]:
        coded[name], scales, plain[name] = quantised(coded[name].float(), block)
        coded[name + suffix] = scales if any(block) else scales.reshape(())
        coded[name.replace(".weight", ".input_scale")] = torch.ones(1)
    for folder, tensors, extra in ((out / "fp8", coded, {"quantization_config": config}), (out / "f32", plain, {})):
        shutil.copytree(model, folder)
        save_file(tensors, folder / "model.safetensors")
        fields = json.loads((model / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(fields | extra))
    return out / "fp8", out / "f32"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen3moe"])
def test_values_are_exact_with_f32(
    tiny_model: Callable[[str], TinyModel], tmp_path: Path, family: str, kind: str
) -> None:
    coded, plain = write(tiny_model(family).directory, tmp_path, kind)
    for path in (coded, plain):
        pack_model(open_source(path), "f32", path.with_suffix(".pack"))
    found, expected = (Pack.open(path.with_suffix(".pack")).manifest for path in (coded, plain))
    assert found.layers == expected.layers


def test_packs_have_8_bits(
    tiny_model: Callable[[str], TinyModel], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    coded, _ = write(tiny_model("llama").directory, tmp_path, "DeepSeek's blocks")
    pack_model(open_source(coded), "auto", tmp_path / "pack")
    shown = capfd.readouterr().err
    assert "activations are not rounded as its configuration says: they stay in float32" in shown
    assert "re-quantised: FP8 as q8, relative RMS error 0." in shown
    pack = Pack.open(tmp_path / "pack")
    shapes = [pack.manifest.blocks[name] for name in pack.manifest.layers[0]]
    assert {part.format for shape in shapes for run in shape.runs for part in run.parts} == {"q8"}


def test_any_rectangle_can_be_read(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    coded, plain = write(tiny_model("llama").directory, tmp_path, "DeepSeek's blocks")
    method = method_of({"quantization_config": DEEPSEEK})
    assert method is not None
    assert method.fp8 is not None
    name, expected = "model.layers.0.mlp.down_proj.weight", load_file(plain / "model.safetensors")
    source = apply_scales(open_safetensors(coded), method.fp8)
    for rows, columns in (((3, 29), (5, 43)), ((24, 25), (39, 41)), ((0, 0), (0, 8))):
        found = source.read(source.tensors[name], rows, columns).view(np.float32)
        np.testing.assert_array_equal(found, expected[name][slice(*rows), slice(*columns)].numpy())
    source.close()


def test_plans_count_8_bits(tiny_model: Callable[[str], TinyModel]) -> None:
    fields = json.loads((tiny_model("llama").directory / "config.json").read_text())
    _, source = from_config(fields | {"quantization_config": DEEPSEEK}, "m")
    assert source.tensors["model.layers.0.mlp.up_proj.weight"].element.nearest == "q8"
    assert source.tensors["model.embed_tokens.weight"].element.nearest != "q8"


@pytest.mark.parametrize(("change", "message"), [
    (lambda tensors, name: tensors.pop(name + "_scale_inv"), "is in FP8, but has no scales"),
    (lambda tensors, name: tensors.update({name + "_scale_inv": torch.ones(2, 2)}), "scales have shape [2, 2], which"),
])  # fmt: skip
def test_scales_that_do_not_fit_are_refused(
    tiny_model: Callable[[str], TinyModel], tmp_path: Path, change: Callable[[Any, str], None], message: str
) -> None:
    coded, _ = write(tiny_model("llama").directory, tmp_path, "DeepSeek's blocks")
    tensors = load_file(coded / "model.safetensors")
    change(tensors, "model.layers.0.mlp.up_proj.weight")
    save_file(tensors, coded / "model.safetensors")
    with pytest.raises(ModelError, match=re.escape(message)):
        open_source(coded)


@pytest.mark.parametrize("config", [
    FP8 | {"fmt": "e5m2"}, FP8 | {"weight_block_size": [0, 128]}, FP8 | {"surprise": 1},
    compressed("group"), compressed("group", num_bits=4), compressed("channel") | {"format": "pack-quantized"},
])  # fmt: skip
def test_others_are_refused(tiny_model: Callable[[str], TinyModel], config: dict[str, Any]) -> None:
    fields = json.loads((tiny_model("llama").directory / "config.json").read_text())
    with pytest.raises(ModelError, match="its weights are quantised in a way that is not supported"):
        from_config(fields | {"quantization_config": config}, "m")
