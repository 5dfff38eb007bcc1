"""Quantised safetensors: exact values with f32, codes kept with auto, and sizes near those of the files."""

import json
import random
import re
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from master.deployment.dtype import choose_dtype
from master.planning.shapes import ModelShape, model_shape
from tests.support.models import TOKENS, TinyModel, forward
from tests.support.paths import ROOT
from tests.support.weights import quantised
from tests.support.weights.packs import part
from tpi.errors import ModelError
from tpi.families.huggingface.configonly import from_config
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.library.locate import Located
from tpi.pack.reader import Pack
from tpi.sources.elements import decode
from tpi.sources.quantised.source import join_quantised, method_of
from tpi.sources.safetensors import open_safetensors

Config = dict[str, Any]
WIDTH = 96  # neurons of an expert


def gptq(bits: int, group: int, symmetric: bool, **more: Any) -> Config:
    settings = {"bits": bits, "group_size": group, "sym": symmetric, "desc_act": False, "damp_percent": 0.1, **more}
    return {"quantization_config": {"quant_method": "gptq", **settings}}


def awq(group: int, **more: Any) -> Config:
    settings = {"bits": 4, "group_size": group, "zero_point": True, "version": "gemm", **more}
    return {"quantization_config": {"quant_method": "awq", "modules_to_not_convert": None, **settings}}


def compressed(format: str, bits: int, group: int | None, symmetric: bool = True, **more: Any) -> Config:
    weights = {
        "num_bits": bits, "type": "float" if "fp" in format else "int", "symmetric": symmetric, "group_size": group,
        "strategy": "group" if group else "channel", "dynamic": False, "observer": "minmax", **more,
    }  # fmt: skip
    return {"quantization_config": {
        "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp[.]gate$"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
    }}  # fmt: skip


def mlx(bits: int, group: int) -> Config:
    settings = {"bits": bits, "group_size": group}
    return {"quantization": settings, "quantization_config": settings}


MODELOPT: Config = {"quantization_config": {
    "quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "producer": {"name": "modelopt"},
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 16}, "targets": ["Linear"]}},
}}  # fmt: skip
CASES: dict[str, tuple[quantised.Writer, Config, str]] = {
    "gptq, 4 bits": (quantised.gptq(4, 32, True), gptq(4, 32, True), "q4s"),
    "gptq, 4 bits with zeros": (quantised.gptq(4, 32, False), gptq(4, 32, False), "q4"),
    "gptq, version 2": (quantised.gptq(4, 32, False, 2), gptq(4, 32, False, checkpoint_format="gptq_v2"), "q4"),
    "gptq, rows": (quantised.gptq(4, -1, True), gptq(4, -1, True), "q4s"),
    "gptq, reordered": (quantised.gptq(4, 32, False, reordered=True), gptq(4, 32, False, desc_act=True), "q8"),
    "gptq, 16 columns": (quantised.gptq(4, 16, True), gptq(4, 16, True), "q8"),
    "gptq, 8 bits": (quantised.gptq(8, 32, True), gptq(8, 32, True), "q8"),
    "gptq, 8 bits with zeros": (quantised.gptq(8, 32, False), gptq(8, 32, False), "q8"),
    "gptq, 3 bits": (quantised.gptq(3, 32, True), gptq(3, 32, True), "q3"),
    "gptq, 3 bits with zeros": (quantised.gptq(3, 32, False), gptq(3, 32, False), "q4"),
    "gptq, 2 bits": (quantised.gptq(2, 32, False), gptq(2, 32, False), "q2"),
    "awq": (quantised.awq(32), awq(32), "q4"),
    "int4": (quantised.compressed(4, 32, True), compressed("pack-quantized", 4, 32), "q4s"),
    "int4 with zeros": (quantised.compressed(4, 32, False), compressed("pack-quantized", 4, 32, False), "q4"),
    "int4, rows": (quantised.compressed(4, -1, False), compressed("pack-quantized", 4, None, False), "q4"),
    "int4, reordered": (
        quantised.compressed(4, 32, True, reordered=True), compressed("pack-quantized", 4, 32, actorder="group"), "q8",
    ),
    "int5 with zeros": (quantised.compressed(5, 32, False), compressed("pack-quantized", 5, 32, False), "q5"),
    "int6": (quantised.compressed(6, 32, True), compressed("pack-quantized", 6, 32), "q6"),
    "int7 with zeros": (quantised.compressed(7, 32, False), compressed("pack-quantized", 7, 32, False), "q8"),
    "int8, packed": (quantised.compressed(8, 32, True), compressed("pack-quantized", 8, 32), "q8"),
    "int8": (quantised.compressed(8, -1, True, int8=True), compressed("int-quantized", 8, None), "q8"),
    "int8 with zeros": (
        quantised.compressed(8, -1, False, int8=True), compressed("int-quantized", 8, None, False), "q8",
    ),
    "mlx, 4 bits": (quantised.mlx(4, 32), mlx(4, 32), "q4"),
    "mlx, 8 bits": (quantised.mlx(8, 32), mlx(8, 32), "q8"),
    "mlx, 3 bits": (quantised.mlx(3, 32), mlx(3, 32), "q4"),
    "nvfp4": (quantised.nvfp4(True), compressed("nvfp4-pack-quantized", 4, 16, strategy="tensor_group"), "nvfp4"),
    "nvfp4 of modelopt": (quantised.nvfp4(False, ("weight", "weight_scale", "weight_scale_2")), MODELOPT, "nvfp4"),
    "mxfp4": (quantised.mxfp4, compressed("mxfp4-pack-quantized", 4, 32), "mxfp4"),
}  # fmt: skip


def packed(path: Path, dtype: str) -> Pack:
    """Pack a model next to its directory, and open the pack."""
    target = path.with_name(f"{path.name}.{dtype}")
    pack_model(open_source(path), dtype, target)
    return Pack.open(target)


@pytest.mark.parametrize("case", CASES)
def test_values_are_exact_with_f32(tiny_model: Callable[[str], TinyModel], tmp_path: Path, case: str) -> None:
    writer, fields, _ = CASES[case]
    coded, plain = quantised.write_quantised(tiny_model("llama").directory, tmp_path, writer, fields)
    assert packed(coded, "f32").manifest.layers == packed(plain, "f32").manifest.layers


@pytest.mark.parametrize("case", CASES)
def test_packs_keep_the_codes(
    tiny_model: Callable[[str], TinyModel], tmp_path: Path, case: str, capfd: pytest.CaptureFixture[str]
) -> None:
    writer, fields, format = CASES[case]
    coded, plain = quantised.write_quantised(tiny_model("llama").directory, tmp_path, writer, fields)
    found, expected = packed(coded, "auto"), packed(plain, "f32")
    anew = "rounded anew" in capfd.readouterr().err
    kept = case not in ("gptq, reordered", "gptq, 16 columns", "int4, reordered", "mlx, 8 bits")
    assert anew == (not kept or case in ("gptq, 8 bits with zeros", "int8 with zeros"))
    for number in range(2):
        for block, reference in zip(found.layers[number], expected.layers[number], strict=True):
            for run in block.shape.runs:
                assert {item.format for item in run.parts} == {format}
                for item in run.parts:
                    values = part(reference, run.name, item.name)
                    error = part(block, run.name, item.name)[: len(values)] - values
                    assert np.linalg.norm(error) <= (1e-2 if anew else 6e-4) * np.linalg.norm(values)


@pytest.mark.parametrize("case", ["gptq, 4 bits with zeros", "awq", "int4", "mlx, 4 bits", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("family", ["phi3", "qwen3moe"])
def test_fused_projections_and_experts(
    tiny_model: Callable[[str], TinyModel], tmp_path: Path, case: str, family: str
) -> None:
    writer, fields, format = CASES[case]
    model = tiny_model(family).directory
    coded, plain = quantised.write_quantised(apart(model, tmp_path), tmp_path, writer, fields)
    assert packed(coded, "f32").manifest.layers == packed(plain, "f32").manifest.layers
    formats = {item.format for half in packed(coded, "auto").layers[0] for run in half.shape.runs for item in run.parts}
    assert formats == {format}


def apart(model: Path, out: Path) -> Path:
    """Return a copy of a model whose experts have 96 neurons, which are whole groups, and matrices of their own."""
    target = shutil.copytree(model, out / "apart")
    tensors, saved = load_file(model / "model.safetensors"), dict[str, torch.Tensor]()
    for name, values in tensors.items():
        if ".experts." not in name:
            saved[name] = values
        elif name.endswith("down_proj.weight"):
            saved[name] = values[:, :WIDTH].contiguous()
        else:
            saved[name] = values[:WIDTH].contiguous()
    save_file(saved, target / "model.safetensors")
    fields = json.loads((model / "config.json").read_text())
    wide = {"moe_intermediate_size": WIDTH} if "moe_intermediate_size" in fields else {}
    (target / "config.json").write_text(json.dumps(fields | wide))
    return target


def test_stacks_of_mlx_are_experts(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    writer, fields, _ = CASES["mlx, 4 bits"]
    coded, plain = quantised.write_quantised(
        apart(tiny_model("qwen3moe").directory, tmp_path), tmp_path, writer, fields
    )
    stack_experts(coded)
    assert packed(coded, "f32").manifest.layers == packed(plain, "f32").manifest.layers


def test_stacks_of_mlx_may_be_floats(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    writer, fields, _ = CASES["mlx, 4 bits"]
    chosen = lambda name: "self_attn" in name and name.endswith("_proj.weight")  # noqa: E731
    coded, plain = quantised.write_quantised(tiny_model("qwen3moe").directory, tmp_path, writer, fields, chosen)
    stack_experts(coded)
    assert packed(coded, "f32").manifest.layers == packed(plain, "f32").manifest.layers


def stack_experts(model: Path) -> None:
    """Replace the tensors of experts by stacks, as MLX does."""
    tensors = load_file(model / "model.safetensors")
    stacks: dict[str, list[torch.Tensor]] = {}
    for name in sorted(name for name in tensors if ".experts." in name):
        stacks.setdefault(re.sub(r"experts[.]\d+[.]", "switch_mlp.", name), []).append(tensors.pop(name))
    save_file(tensors | {name: torch.stack(each) for name, each in stacks.items()}, model / "model.safetensors")


@pytest.mark.parametrize("case", ["gptq, reordered", "awq", "int8 with zeros", "mlx, 4 bits", "nvfp4", "mxfp4"])
def test_logits_are_those_of_the_dequantised_model(
    tiny_model: Callable[[str], TinyModel], tmp_path: Path, case: str
) -> None:
    import transformers

    writer, fields, _ = CASES[case]
    coded, plain = quantised.write_quantised(tiny_model("llama").directory, tmp_path, writer, fields)
    reference = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = reference(torch.tensor([TOKENS])).logits[0].numpy()
    exact, kept = forward(packed(coded, "f32"), TOKENS), forward(packed(coded, "auto"), TOKENS)
    np.testing.assert_allclose(exact, expected, atol=1e-4)
    assert np.abs(kept - expected).mean() < 0.02 * np.abs(expected).mean()


def test_embeddings_and_heads_of_mlx_keep_their_codes(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    writer, fields, _ = CASES["mlx, 4 bits"]
    everything = lambda name: name.endswith("_proj.weight") or "embed" in name or "lm_head" in name  # noqa: E731
    coded, plain = quantised.write_quantised(tiny_model("llama").directory, tmp_path, writer, fields, everything)
    exact, expected = packed(coded, "f32").manifest, packed(plain, "f32").manifest
    assert (exact.embedding, exact.head) == (expected.embedding, expected.head)
    assert {item.format for run in packed(coded, "auto").embedding.shape.runs for item in run.parts} == {"q4"}


def test_layers_may_have_settings_of_their_own(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    four, eight = quantised.mlx(4, 32), quantised.mlx(8, 32)
    other = "model.layers.1.mlp.down_proj"
    settings = {"bits": 4, "group_size": 32, other: {"bits": 8, "group_size": 32}, "lm_head": False}
    coded, plain = quantised.write_quantised(
        tiny_model("llama").directory, tmp_path,
        lambda module, weights: (eight if module == other else four)(module, weights), {"quantization": settings},
    )  # fmt: skip
    assert packed(coded, "f32").manifest.layers == packed(plain, "f32").manifest.layers


def test_patterns_of_gptq_choose_bits(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    four, eight = quantised.gptq(4, 32, True), quantised.gptq(8, 32, True)
    config = gptq(4, 32, True, dynamic={r"-:.*k_proj": {}, r"+:.*\.1\..*down_proj": {"bits": 8}})
    coded, plain = quantised.write_quantised(
        tiny_model("llama").directory, tmp_path,
        lambda module, weights: (eight if "1.mlp.down" in module else four)(module, weights), config,
        lambda name: name.endswith("_proj.weight") and "k_proj" not in name,
    )  # fmt: skip
    assert packed(coded, "f32").manifest.layers == packed(plain, "f32").manifest.layers


def test_biases_of_zeros_are_left_out(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    writer, fields, _ = CASES["gptq, 4 bits"]
    coded, plain = quantised.write_quantised(tiny_model("llama").directory, tmp_path, writer, fields)
    tensors = load_file(coded / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.bias"
    save_file(tensors | {name: torch.zeros(96)}, coded / "model.safetensors")
    assert packed(coded, "f32").manifest.layers == packed(plain, "f32").manifest.layers
    save_file(tensors | {name: torch.ones(96)}, coded / "model.safetensors")
    with pytest.raises(ModelError, match=f"tensors that llama models do not have: {name}"):
        packed(coded, "q8")


@pytest.mark.parametrize(
    ("dtype", "most"), [("gptq, 4 bits", 1.0), ("awq", 1.12), ("int8", 1.05), ("nvfp4", 1.12), ("mxfp4", 1.0)]
)
def test_packs_are_about_as_large_as_files(
    tiny_model: Callable[[str], TinyModel], tmp_path: Path, dtype: str, most: float
) -> None:
    writer, fields, _ = CASES[dtype]
    coded, _ = quantised.write_quantised(tiny_model("llama").directory, tmp_path, writer, fields)
    pack = packed(coded, "auto")
    held = sum(run.units * run.unit_bytes for half in pack.layers[0] for run in half.shape.runs)
    stored = load_file(coded / "model.safetensors")
    kinds = ("g_idx", "weight_shape", "norm.weight")
    size = sum(
        tensor.nbytes for name, tensor in stored.items() if ".layers.0." in name and not name.endswith(kinds)
    )  # fmt: skip
    assert held <= most * size


Change = dict[str, torch.Tensor | None]
"""The tensors of a module that are replaced, or removed, by the ends of their names."""
WORDS = torch.ones(2, 2, dtype=torch.int32)
BROKEN: list[tuple[str, Change, str]] = [
    ("gptq, 4 bits", {"scales": None}, "has no tensor {}.scales for its quantised"),
    ("gptq, 4 bits", {"qzeros": None}, "has no tensor {}.qzeros for its quantised"),
    ("awq", {"scales": torch.ones(2, 2)}, "{}.scales has shape [2, 2], but"),
    ("awq", {"qzeros": WORDS}, "{}.qzeros has shape [2, 2], but"),
    ("gptq, reordered", {"g_idx": torch.full((96,), 9, dtype=torch.int32)}, "{}.g_idx names groups that do not exist"),
    ("int4", {"weight_shape": torch.tensor([160, 200])}, "{}.weight_packed has shape [160, 12], but"),
    ("int4", {"weight_scale": torch.ones(3)}, "{}.weight_scale has shape [3], but"),
    ("int4 with zeros", {"weight_zero_point": WORDS}, "{}.weight_zero_point has shape [2, 2], but"),
    ("int8 with zeros", {"weight_zero_point": None}, "has no tensor {}.weight_zero_point"),
    ("mlx, 4 bits", {"biases": None}, "has no tensor {}.biases"),
    ("mlx, 4 bits", {"scales": torch.ones(160, 2)}, "{}.weight has shape [160, 12], but"),
    ("nvfp4", {"weight_global_scale": None}, "has no tensor {}.weight_global_scale"),
    ("mxfp4", {"weight_scale": torch.ones(160, 2).byte()}, "{}.weight_scale has shape [160, 2], but"),
]


@pytest.mark.parametrize(("case", "change", "message"), BROKEN)
def test_broken_files_are_refused_in_one_sentence(
    tiny_model: Callable[[str], TinyModel], tmp_path: Path, case: str, change: Change, message: str
) -> None:
    writer, fields, _ = CASES[case]
    coded, _ = quantised.write_quantised(tiny_model("llama").directory, tmp_path, writer, fields)
    tensors, name = load_file(coded / "model.safetensors"), "model.layers.0.mlp.up_proj"
    for end, tensor in change.items():
        del tensors[f"{name}.{end}"]
        tensors |= {f"{name}.{end}": tensor} if tensor is not None else {}
    save_file(tensors, coded / "model.safetensors")
    with pytest.raises(ModelError, match=re.escape(message.format(name))) as refusal:
        open_source(coded)
    assert str(refusal.value).count("\n") == 0


def test_zero_points_of_symmetric_groups_are_refused(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    coded, _ = quantised.write_quantised(
        tiny_model("llama").directory, tmp_path, quantised.gptq(4, 32, False), gptq(4, 32, True)
    )
    with pytest.raises(ModelError, match="has zero points, but the configuration calls it symmetric"):
        packed(coded, "auto")


GROUP = compressed("pack-quantized", 4, 32)["quantization_config"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (gptq(4, 32, True, checkpoint_format="marlin"), "checkpoint_format is 'marlin'"),
        (gptq(5, 32, True), "bits is '5'"),
        (gptq(4, 0, True), "group_size is 0"),
        (gptq(4, 32, True, rotation="hadamard"), "rotation is 'hadamard'"),
        (gptq(4, 32, True, surprise=1), "has the field 'surprise', which is not known"),
        (gptq(4, 32, True, dynamic={"(a+)+b": {}}), "the pattern '(a+)+b' is too complex"),
        (awq(32, version="gemv"), "version is 'gemv'"),
        (awq(32, bits=3), "bits is '3'"),
        (awq(32, surprise=1), "has the field 'surprise'"),
        (compressed("marlin-24", 4, 32), "compressed-tensors, marlin-24"),
        (compressed("mxfp8-quantized", 8, 32), "compressed-tensors, mxfp8-quantized"),
        (compressed("pack-quantized", 4, 32, surprise=1), "has the field 'surprise'"),
        ({"quantization_config": GROUP | {"transform_config": {"config_groups": {"a": 1}}}}, "config_groups"),
        ({"quantization_config": GROUP | {"sparsity_config": {"format": "sparse-24-bitmask"}}}, "format is 'sparse-24"),
        ({"quantization_config": GROUP | {"config_groups": {"a": {"targets": ["Embedding"]}}}}, "'Embedding'"),
        ({"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp8"}}, "mode is 'mxfp8'"),
        ({"quantization": {"bits": 4, "group_size": 32, "surprise": 1}}, "has the field 'surprise'"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}}, "modelopt, W4A8_AWQ"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "bitsandbytes"),
        ({"quantization_config": {"quant_method": "mxfp4", "surprise": 1}}, "has the field 'surprise'"),
    ],
)  # fmt: skip
def test_unknown_settings_are_refused_by_name(
    tiny_model: Callable[[str], TinyModel], fields: Config, message: str
) -> None:
    config = json.loads((tiny_model("llama").directory / "config.json").read_text())
    with pytest.raises(ModelError, match=re.escape(message)) as refusal:
        from_config(config | fields, "m")
    assert "in a way that is not supported" in str(refusal.value)


def test_modules_may_have_schemes_of_their_own(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    writers = {"q_proj": quantised.nvfp4(True), "k_proj": quantised.compressed(8, 32, True), "down_proj": fp8}
    four = quantised.compressed(4, 32, True)
    formats = {
        "nvfp4": ("nvfp4-pack-quantized", 4, 16, "re:.*q_proj$"), "int8": ("pack-quantized", 8, 32, "re:.*k_proj$"),
        "fp8": ("float-quantized", 8, None, "re:.*down_proj$"), "int4": ("pack-quantized", 4, 32, "Linear"),
    }  # fmt: skip
    groups = {
        name: {
            "targets": [target], "format": format, "input_activations": {"num_bits": 8},
            "weights": {"num_bits": bits, "type": "int" if "int" in name else "float", "group_size": group,
                        "strategy": "group" if group == 32 else "tensor_group" if group else "channel"},
        } for name, (format, bits, group, target) in formats.items()
    }  # fmt: skip
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    coded, plain = quantised.write_quantised(
        tiny_model("llama").directory, tmp_path,
        lambda module, weights: writers.get(module.rpartition(".")[2], four)(module, weights),
        {"quantization_config": config},
    )  # fmt: skip
    assert packed(coded, "f32").manifest.layers == packed(plain, "f32").manifest.layers
    query = packed(coded, "auto").layers[0][0].run("query")
    assert {item.name: item.format for item in query.parts} == {"q": "nvfp4", "o": "q4s"}


def fp8(module: str, weights: quantised.F32) -> tuple[quantised.Tensors, quantised.F32]:
    """Return the FP8 tensors of a module with a scale for each row, and the exact values."""
    values = torch.from_numpy(weights)
    scales = values.abs().amax(1, keepdim=True) / 448
    codes = (values / scales).to(torch.float8_e4m3fn)
    return {f"{module}.weight": codes, f"{module}.weight_scale": scales}, (codes.float() * scales).numpy()


@pytest.mark.parametrize("case", CASES)
def test_plans_know_formats_from_config_alone(
    tiny_model: Callable[[str], TinyModel], tmp_path: Path, case: str
) -> None:
    writer, fields, _ = CASES[case]
    coded, _ = quantised.write_quantised(tiny_model("llama").directory, tmp_path, writer, fields)
    with_weights = shape_of(coded)
    (coded / "model.safetensors").unlink()
    assert [block.runs for block in with_weights.blocks] == [block.runs for block in shape_of(coded).blocks]


def shape_of(model: Path) -> ModelShape:
    """Return the shape that a plan with plenty of memory uses."""
    return model_shape(str(model), "auto", model.parent / "cache", 1 << 40)


def test_little_memory_does_not_enlarge_a_pack(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    writer, fields, _ = CASES["gptq, 4 bits"]
    coded, _ = quantised.write_quantised(tiny_model("llama").directory, tmp_path, writer, fields)
    located = Located("directory", coded, "coded")
    assert choose_dtype("auto", located, [1], [1]) == "auto"
    everything = quantised.mlx(4, 32)
    config = {"quantization": {"bits": 4, "group_size": 32}}
    coded, _ = quantised.write_quantised(
        tiny_model("llama").directory, tmp_path / "all", everything, config, lambda name: "norm" not in name
    )
    assert model_shape(str(coded), "auto", tmp_path, 1).dtype == "auto"


@pytest.mark.parametrize(
    ("name", "config"),
    [("quantize_config.json", gptq(4, 32, True)["quantization_config"]),
     ("hf_quant_config.json", {"producer": {"name": "modelopt"}, "quantization": {
         "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"], "kv_cache_quant_algo": "FP8"}})],
)  # fmt: skip
def test_settings_may_be_in_a_file_of_their_own(
    tiny_model: Callable[[str], TinyModel], tmp_path: Path, name: str, config: Config
) -> None:
    writer, _, _ = CASES["gptq, 4 bits" if name.startswith("quantize") else "nvfp4 of modelopt"]
    coded, plain = quantised.write_quantised(tiny_model("llama").directory, tmp_path, writer, {})
    (coded / name).write_text(json.dumps(config))
    assert packed(coded, "f32").manifest.layers == packed(plain, "f32").manifest.layers


@pytest.mark.parametrize("seed", range(24))
def test_random_settings_are_equal_or_refused(
    tiny_model: Callable[[str], TinyModel], tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    method = draw.choice(["gptq", "compressed", "mlx", "awq"])
    bits, group, symmetric = draw.choice([2, 3, 4, 8]), draw.choice([16, 32, 96, -1]), draw.random() < 0.5
    reordered = draw.random() < 0.3
    if method == "gptq":
        version = draw.choice([1, 2])
        writer = quantised.gptq(bits, group, symmetric, version, reordered)
        fields = gptq(bits, group, symmetric, desc_act=reordered, checkpoint_format=["gptq", "gptq_v2"][version - 1])
    elif method == "compressed":
        int8 = draw.random() < 0.3
        writer = quantised.compressed(bits, group, symmetric, int8, reordered)
        settings = {"actorder": "group"} if reordered else {}
        format = "int-quantized" if int8 else "pack-quantized"
        fields = compressed(format, bits, None if group == -1 else group, symmetric, **settings)
    elif method == "mlx":
        group = abs(group) if group != -1 else 32
        writer, fields = quantised.mlx(bits, group), mlx(bits, group)
    else:
        writer, fields = quantised.awq(group), awq(group)
    chosen = lambda name: "self_attn" in name and name.endswith("_proj.weight")  # noqa: E731
    wrong = draw.choice([None, None, "bits", "group_size"])
    if wrong and method in ("gptq", "mlx"):
        settings = fields["quantization_config"]
        settings[wrong] = draw.choice([each for each in (2, 4, 8, 16, 32, 48) if each != settings[wrong]])
    coded, plain = quantised.write_quantised(tiny_model("llama").directory, tmp_path, writer, fields, chosen)
    try:
        found = packed(coded, "f32")
    except ModelError as error:
        if not wrong or method not in ("gptq", "mlx"):
            raise AssertionError(f"{method} of {bits} bits is refused") from error
        return
    assert found.manifest.layers == packed(plain, "f32").manifest.layers


LIBRARIES: dict[str, Config] = {
    "int4": compressed("pack-quantized", 4, 32), "int4 with zeros": compressed("pack-quantized", 4, 32, False),
    "int3": compressed("pack-quantized", 3, 32), "int8": compressed("int-quantized", 8, 32),
    "int8 with zeros": compressed("int-quantized", 8, 32, False),
    "nvfp4": compressed("nvfp4-pack-quantized", 4, 16, strategy="tensor_group"),
    "mxfp4": compressed("mxfp4-pack-quantized", 4, 32), "awq": awq(32),
    **{f"gptq, {bits} bits": gptq(bits, 32, False) for bits in (2, 3, 4, 8)},
    **{f"mlx, {bits} bits": mlx(bits, 32) for bits in (2, 3, 4, 5, 6, 8)},
}  # fmt: skip


@pytest.mark.parametrize("case", LIBRARIES)
def test_values_are_those_of_the_library_that_wrote_them(tmp_path: Path, case: str) -> None:
    """The file has tensors that compressed-tensors 0.20, AutoGPTQ 0.7, AutoAWQ 0.2.9 and MLX 0.32 wrote and decoded."""
    recorded = load_file(ROOT / "tests/support/data/quantised.safetensors")
    held = {name.removeprefix(f"{case}."): tensor for name, tensor in recorded.items() if name.startswith(f"{case}.")}
    expected = held.pop("values").numpy()
    save_file(held, tmp_path / "model.safetensors")
    method = method_of(LIBRARIES[case])
    assert method is not None
    with closing(open_safetensors(tmp_path)) as stored:
        source, _ = join_quantised(stored, method)
        tensor = source.tensors["m.weight"]
        assert tensor.shape == expected.shape
        found = decode(tensor.element, source.read(tensor, (0, tensor.rows), (0, tensor.columns)))
        tolerance = 2.0**-8 if case == "nvfp4" else 0  # this one is decoded to bfloat16
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=0)
        columns = (32, 64) if tensor.element.quantised else (7, 39)
        part = decode(tensor.element, source.read(tensor, (3, 9), columns))
        np.testing.assert_array_equal(part, found[3:9, slice(*columns)])
