"""MXFP4 in packs: the codes of the source, from safetensors and from GGUF, or another format on request."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from tests.support.models import SIZES, TOKENS, TinyModel, forward
from tests.support.weights.gguf_experts import write_experts
from tests.support.weights.packs import part
from tests.support.weights.split import split_forward
from tpi.errors import ModelError
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.groups import dequantise_groups, quantise_groups
from tpi.pack.layout import Part, RunLayout
from tpi.pack.reader import Pack

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
EXPERTS, WIDTH, HIDDEN = 5, 96, SIZES["hidden_size"]


@given(st.integers(0, 2**32 - 1), st.integers(-20, 20))
@settings(max_examples=30, deadline=None)
def test_groups_are_those_of_gguf(seed: int, power: int) -> None:
    values = np.random.default_rng(seed).standard_normal((3, 64)).astype(np.float32) * np.float32(2.0**power)
    values[0, :32] = 0
    blocks = quantise_groups("mxfp4", values)
    decoded = dequantise_groups("mxfp4", blocks)
    theirs = quants.dequantize(blocks.reshape(3, -1), GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(decoded, theirs)
    again = quants.dequantize(quants.quantize(values, GGMLQuantizationType.MXFP4), GGMLQuantizationType.MXFP4)
    assert np.square(decoded - values).sum() <= 1.001 * np.square(again - values).sum()
    np.testing.assert_array_equal(dequantise_groups("mxfp4", quantise_groups("mxfp4", decoded)), decoded)


def test_records_are_refused() -> None:
    with pytest.raises(ModelError, match="mxfp4 cannot be stored neuron by neuron; use --dtype q8 or q4"):
        RunLayout("neuron", "record", (Part("up", "mxfp4", "row"),), 32, 64, 1)


def blocked(values: F32) -> tuple[U8, U8, F32]:
    """Return blocks and scales of `[experts, rows, columns]` as in OpenAI's files, and the values that they mean."""
    groups = quantise_groups("mxfp4", values)
    codes = np.concatenate([groups[..., 1:] & 15, groups[..., 1:] >> 4], axis=-1)
    halves = codes[..., ::2] | codes[..., 1::2] << np.uint8(4)
    return halves, np.ascontiguousarray(groups[..., 0]), dequantise_groups("mxfp4", groups)


@pytest.fixture
def microscaled(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> tuple[Path, Path]:
    """Return the tiny model with experts of 96 neurons in MXFP4, and the same in float32, as in transformers."""
    import torch
    import transformers

    source = tiny_model("gptoss").directory
    config = transformers.AutoConfig.from_pretrained(source)
    config.intermediate_size = WIDTH
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "made")
    tensors = load_file(tmp_path / "made" / "model.safetensors")
    coded, plain = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        wanted = np.random.default_rng(len(name)).standard_normal(tensors[name].shape).astype(np.float32) * 0.1
        blocks, scales, values = blocked(np.ascontiguousarray(wanted.swapaxes(1, 2)))
        del coded[name]
        coded |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = np.ascontiguousarray(values.swapaxes(1, 2))
    fields = json.loads((tmp_path / "made" / "config.json").read_text())
    for kind, held in (("coded", coded), ("plain", plain)):
        target = tmp_path / kind
        target.mkdir()
        save_file(held, target / "model.safetensors", {"format": "pt"})
        for file in source.glob("tokenizer*"):
            (target / file.name).write_bytes(file.read_bytes())
        extra = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
        (target / "config.json").write_text(json.dumps(fields | (extra if kind == "coded" else {})))
    return tmp_path / "coded", tmp_path / "plain"


def packed(source: Path, dtype: str, target: Path) -> Pack:
    pack_model(open_source(source), dtype, target)
    return Pack.open(target)


def test_blocks_of_safetensors_stay_what_they_are(microscaled: tuple[Path, Path], tmp_path: Path) -> None:
    import torch
    import transformers

    coded, plain = microscaled
    kept = packed(coded, "auto", tmp_path / "kept")
    assert {item.format for item in kept.layers[0][1].run("neuron").parts} == {"mxfp4"}
    exact, same = packed(coded, "f32", tmp_path / "exact"), packed(plain, "f32", tmp_path / "same")
    for name in ("gate", "up", "down"):
        expected = part(same.layers[1][1], "neuron", name)
        np.testing.assert_array_equal(part(kept.layers[1][1], "neuron", name), expected)
        np.testing.assert_array_equal(part(exact.layers[1][1], "neuron", name), expected)
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
        logits = model(torch.tensor([TOKENS])).logits[0].numpy()
    for shares in ((1.0,), (3, 2, 1)):
        np.testing.assert_allclose(split_forward(exact, TOKENS, shares, steps=3), logits, atol=1e-4)
        got = split_forward(kept, TOKENS, shares, steps=3)
        assert np.linalg.norm(got - logits) < 0.03 * np.linalg.norm(logits)


@pytest.mark.parametrize("dtype", ["q8", "q4", "bf16"])
def test_another_format_may_be_asked_for(microscaled: tuple[Path, Path], dtype: str, tmp_path: Path) -> None:
    coded, plain = microscaled
    expected = forward(packed(plain, "f32", tmp_path / "exact"), TOKENS)
    got = forward(packed(coded, dtype, tmp_path / "asked"), TOKENS)
    assert np.linalg.norm(got - expected) < (0.5 if dtype == "q4" else 0.05) * np.linalg.norm(expected)


def test_blocks_of_gguf_stay_what_they_are(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    """Columns of down are not whole groups in the tiny model. A run has one format, so this run is exact in f32."""
    model = tiny_model("gptoss")
    write_experts(
        tmp_path / "m.gguf", model, "gptoss", lambda name: "MXFP4" if "_exps" in name and "down" not in name else "F32"
    )
    pack = packed(tmp_path / "m.gguf", "auto", tmp_path / "pack")
    found = part(pack.layers[0][1], "neuron", "up").reshape(EXPERTS, -1, HIDDEN)[:, :100]
    fused = model.reference.state_dict()["model.layers.0.mlp.experts.gate_up_proj"].numpy().swapaxes(1, 2)[:, 1::2]
    kind = GGMLQuantizationType.MXFP4
    np.testing.assert_array_equal(found, quants.dequantize(quants.quantize(np.ascontiguousarray(fused), kind), kind))


def test_scales_that_do_not_fit_are_refused(microscaled: tuple[Path, Path]) -> None:
    coded, _ = microscaled
    tensors = load_file(coded / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    tensors[name] = np.ascontiguousarray(tensors[name][:, :-1])
    save_file(tensors, coded / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"down_proj_blocks has shape .* but its quantised weights ask for"):
        open_source(coded)


def test_other_families_may_have_experts_in_mxfp4(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    source = tiny_model("qwen35moe").directory
    fields = json.loads((source / "config.json").read_text()) | {"moe_intermediate_size": WIDTH}
    tensors = {name: held for name, held in load_file(source / "model.safetensors").items() if ".experts." not in name}
    coded, plain = dict(tensors), dict(tensors)
    shapes = {"gate_up_proj": (5, 2 * WIDTH, HIDDEN), "down_proj": (5, HIDDEN, WIDTH)}
    for layer in range(2):
        for part_name, shape in shapes.items():
            name = f"model.layers.{layer}.mlp.experts.{part_name}"
            wanted = np.random.default_rng(layer).standard_normal(shape).astype(np.float32)
            coded[f"{name}_blocks"], coded[f"{name}_scales"], plain[name] = blocked(wanted)
    for kind, held in (("coded", coded), ("plain", plain)):
        shutil.copytree(source, tmp_path / kind)
        save_file(held, tmp_path / kind / "model.safetensors", {"format": "pt"})
        extra = {"quantization_config": {"quant_method": "mxfp4"}} if kind == "coded" else {}
        (tmp_path / kind / "config.json").write_text(json.dumps(fields | extra))
    found, expected = (packed(tmp_path / kind, "f32", tmp_path / f"{kind}.pack") for kind in ("coded", "plain"))
    assert found.manifest.layers == expected.manifest.layers
    kept = packed(tmp_path / "coded", "auto", tmp_path / "kept")
    assert {item.format for item in kept.layers[0][1].run("neuron").parts} == {"mxfp4"}
